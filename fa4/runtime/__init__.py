"""From a request to a launch: ``forward`` prepares arguments, ``virtual`` and ``cuda`` execute."""
