"""``python -m fa4``: the ``fa4`` command."""

import sys

from fa4.cli import main

sys.exit(main())
