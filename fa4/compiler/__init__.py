"""From a request to machine code, and the cache in between."""

from __future__ import annotations

from fa4.compiler.artifact import Artifact as Artifact
from fa4.compiler.lookup import get as get
