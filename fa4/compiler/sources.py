"""The source files that a kernel is built from, found by reading imports, never by importing."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from fa4.errors import CompileError

_IMPORT = re.compile(r"\bimport\b")


def source_files(modules: tuple[str, ...]) -> dict[str, Path]:
    """Module name to file, for ``modules``, everything of their packages and of fa4 that they import, and the packages around each.

    Imports inside functions count, those under ``if TYPE_CHECKING`` do not.

    Raises:
        CompileError: a module of ``modules`` has no source file, or a file cannot be parsed.
    """
    for module in modules:
        if _file(module) is None:
            raise CompileError(f"module {module} has no source file, which a compile key needs; install the package with its sources")
    packages = {module.partition(".")[0] for module in modules} | {"fa4"}
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found or module.partition(".")[0] not in packages:
            continue
        path = _file(module)
        if path is None:
            continue  # `from package import name` where name is no module
        found[module] = path
        waiting.extend(_imports(path, module))
        waiting.extend(module[:i] for i, character in enumerate(module) if character == ".")
    return found


@lru_cache(maxsize=256)
def source_digest(modules: tuple[str, ...]) -> str:
    """A hash over the names and contents of ``source_files``. Read once per process, as a running process's code is.

    Raises:
        CompileError: as ``source_files``.
    """
    digest = hashlib.sha256()
    for module, path in sorted(source_files(modules).items()):
        content = path.read_bytes()
        digest.update(f"{module}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _file(module: str) -> Path | None:
    """The source file of a module, by the layout of its package; only the top-level name is looked up on ``sys.path``."""
    top, *rest = module.split(".")
    spec = _top_level(top)
    if spec is None:
        return None
    path = spec.joinpath(*rest)
    candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@lru_cache(maxsize=64)
def _top_level(name: str) -> Path | None:
    """The folder of a top-level package, or a module's path without suffix."""
    spec = PathFinder.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).with_suffix("") if spec.origin and spec.origin.endswith(".py") else None


def _imports(path: Path, module: str) -> Iterator[str]:
    """Names that a file may import as modules: of `from a import b` both a and a.b."""
    try:
        tree = _parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise CompileError(f"{path} cannot be parsed: {error}") from error
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.expr):  # an import is a statement, and statements are not inside expressions
            waiting.extend(ast.iter_child_nodes(node))


def _parse(source: str) -> ast.Module:
    """A syntax tree with every import of ``source``; of its import statements alone where those can be told by their lines.

    Parsing whole files took two thirds of the time to a key.
    """
    statements = _import_lines(source)
    if statements is not None:
        try:
            return ast.parse(statements)
        except SyntaxError:  # prose that looks like an import
            pass
    return ast.parse(source)


def _import_lines(source: str) -> str | None:
    """The import statements, one a line; None where a line has the word in another place, goes on in the next, or a condition decides."""
    if "TYPE_CHECKING" in source or "\\\n" in source:
        return None
    found = []
    lines = iter(source.splitlines())
    for line in lines:
        statement = line.strip()
        if not _IMPORT.search(statement) or statement.startswith("#"):
            continue
        if not statement.startswith(("import ", "from ")):
            return None
        statement = statement.partition("#")[0]
        while statement.count("(") > statement.count(")"):
            following = next(lines, None)
            if following is None:
                return None
            statement = f"{statement} {following.partition('#')[0].strip()}"
        found.append(statement)
    return "\n".join(found)
