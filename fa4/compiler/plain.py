"""Any value that decides what a kernel does, as plain JSON-able data; a value that cannot be told apart from others raises.

Functions are told apart by what they compute, not by their text: code objects, defaults, closure values, and the globals that the
code refers to, recursively. Two lambdas on one line differ, and so does one function before and after a global that it reads was
changed. Neither torch nor cutlass is imported: their objects are recognised by where their class was defined.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fa4.errors import CompileError

_GLOBAL_INSTRUCTIONS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


def plain(value: object, path: str = "value") -> Any:
    """``value`` as nested lists, strings and numbers; equal data means that a kernel built from either value is the same.

    Raises:
        CompileError: what cannot be keyed, naming it by ``path`` and saying how to fix it.
    """
    try:
        return _Encoder().encode(value, path)
    except RecursionError:
        raise unkeyable(path, value, "it is nested too deeply, or contains itself; pass flat data") from None


def contains_function(data: object) -> bool:
    """Whether data made by ``plain`` has a function in it, whose globals or closure may change while it stays the same object."""
    if isinstance(data, list):
        return (bool(data) and data[0] in ("function", "method", "partial")) or any(map(contains_function, data))
    return False


class _Encoder:
    """One walk. Functions and classes met before are named by order, so that recursion ends."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def encode(self, value: object, path: str) -> Any:
        if value is None or value is Ellipsis:
            return None if value is None else ["ellipsis"]
        if isinstance(value, Enum):
            return ["enum", *_name(type(value)), value.name, self.encode(value.value, path)]
        if type(value) in (bool, int, str):
            return value
        if type(value) in (float, complex):
            return [type(value).__name__, repr(value)]  # repr is exact, and tells -0.0 from 0.0
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", value.hex()]
        if type(value) in (tuple, list):
            return [type(value).__name__, *(self.encode(item, f"{path}[{i}]") for i, item in enumerate(value))]  # type: ignore[arg-type, var-annotated]
        if type(value) is dict:  # in order: code may depend on it
            return ["dict", *(["item", self.encode(key, path), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items())]
        if type(value) in (set, frozenset):
            return ["set", *sorted((self.encode(item, path) for item in value), key=repr)]  # type: ignore[attr-defined]
        if type(value) is range:
            return ["range", value.start, value.stop, value.step]
        return self._object(value, path)

    def _object(self, value: object, path: str) -> Any:
        if isinstance(value, FunctionType):
            return self._once(value, path, self._function)
        if isinstance(value, MethodType):
            return ["method", self.encode(value.__func__, path), self.encode(value.__self__, f"{path}.__self__")]
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return [
                "partial",
                *(self.encode(part, f"{path}.{name}") for part, name in zip(parts, ("func", "args", "keywords"), strict=True)),
            ]
        if isinstance(value, BuiltinFunctionType) and (value.__self__ is None or isinstance(value.__self__, ModuleType)):
            return ["builtin", value.__module__, value.__qualname__, _owner(value.__module__ or "builtins", path, value)]
        if isinstance(value, ModuleType):
            return self._module(value, path)
        if isinstance(value, type):
            return self._once(value, path, self._class)
        if isinstance(value, CodeType):
            return self._code(value, path)
        if is_dataclass(value):
            members = [[f.name, self.encode(getattr(value, f.name), f"{path}.{f.name}")] for f in fields(value)]
            return ["instance", self.encode(type(value), path), *members]
        return _foreign(value, path)

    def _once(self, value: Any, path: str, encode: Any) -> Any:
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        return encode(value, path)

    def _function(self, function: FunctionType, path: str) -> Any:
        """A function's module says whether its globals are followed: those of a versioned library are fixed by its version."""
        module = function.__globals__.get("__name__", "")
        owner = _owner(module, path, function, required=False)
        wrapped = getattr(function, "__wrapped__", None)
        code = _written(function)
        return [
            "function",
            owner,
            self._code(code, path),
            self.encode(function.__defaults__, f"{path} defaults"),
            self.encode(function.__kwdefaults__, f"{path} keyword defaults"),
            # A decorator's own cells hold its machinery; what it decorates is named by __wrapped__.
            None if owner and wrapped else self._cells(function, path),
            None if owner else [[n, self._global(function.__globals__, n, path)] for n in _global_names(code)],
            self.encode(wrapped, f"{path} wrapped"),
        ]

    def _code(self, code: CodeType, path: str) -> Any:
        # Instructions and what they index. Line numbers and file names are left out: they change nothing.
        constants = [self.encode(constant, f"{path} constant") for constant in code.co_consts]
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        handlers = getattr(code, "co_exceptiontable", b"")
        return ["code", code.co_code.hex(), handlers.hex(), list(counts), [list(each) for each in names], constants]

    def _cells(self, function: FunctionType, path: str) -> Any:
        cells = zip(_written(function).co_freevars, function.__closure__ or (), strict=True)
        return [[name, self._cell(cell, f"{path} closure {name}")] for name, cell in cells]

    def _cell(self, cell: CellType, path: str) -> Any:
        try:
            return self.encode(cell.cell_contents, path)
        except ValueError:  # not assigned yet
            return ["unset"]

    def _global(self, namespace: Mapping[str, Any], name: str, path: str) -> Any:
        if name in namespace:
            return self.encode(namespace[name], f"{path} global {name}")
        return ["builtins", name] if hasattr(builtins, name) else ["unset"]

    def _class(self, kind: type, path: str) -> Any:
        """A library's class by name and version; a user's by its name, bases and functions."""
        owner = _owner(kind.__module__, path, kind, required=False)
        if owner:
            return ["class", *_name(kind), owner]
        functions = []
        for name, member in vars(kind).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            # Dataclasses generate methods from their fields, which an instance's key has.
            if isinstance(function, FunctionType):
                if getattr(function, "__wrapped__", function).__code__.co_filename != "<string>":
                    functions.append([name, self.encode(function, f"{path}.{name}")])
            elif not name.startswith("__") and not callable(member) and not hasattr(member, "__get__"):
                functions.append([name, self.encode(member, f"{path}.{name}")])
        bases = [self.encode(base, path) for base in kind.__bases__]
        return ["class", *_name(kind), bases, functions]

    def _module(self, module: ModuleType, path: str) -> Any:
        return ["module", module.__name__, _owner(module.__name__, path, module)]


def _written(function: FunctionType) -> CodeType:
    """A function's code as it was written: the DSL puts other code in its place when it first traces it, and keeps that."""
    code = getattr(function, "_original_code", function.__code__)
    return code if isinstance(code, CodeType) else function.__code__


def unkeyable(path: str, value: object, remedy: str) -> CompileError:
    """The error for a value that has no key: nothing would notice if it changed, and a stale kernel would run."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return CompileError(f"{path} is a {kind}, which cannot be part of a compile key; {remedy}")


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _foreign(value: object, path: str) -> Any:
    """Values of torch's and numpy's small types, which are data; anything else has no key."""
    module, name = _name(type(value))
    if module == "torch" and name in ("dtype", "device", "layout", "memory_format"):
        return ["torch", name, str(value)]
    if module == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return ["numpy", str(value.dtype), repr(value.item())]  # type: ignore[attr-defined]
    if module == "torch" or name in ("Tensor", "ndarray"):
        raise unkeyable(path, value, "capture numbers or tuples of numbers instead of an array, for example tuple(x.tolist())")
    raise unkeyable(path, value, "capture plain data, functions or a dataclass of them instead")


@functools.lru_cache(maxsize=1024)  # code never changes, and a function's key is asked for at every call
def _global_names(code: CodeType) -> tuple[str, ...]:
    names = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _GLOBAL_INSTRUCTIONS]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return tuple(sorted(set(names)))


def _owner(module: str, path: str, value: object, required: bool = True) -> Any:
    """What fixes a module's contents: Python's version, a library's, or this package's sources. None for a user's own module.

    Raises:
        CompileError: ``required``, and nothing does.
    """
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:  # Python's version is part of every key
        return None if top == "__main__" else ["python"]
    if top == "fa4":
        from fa4.compiler.sources import source_digest

        return ["fa4", source_digest((module,))]
    if _is_library(top):
        return ["library", top, _library_version(top, path, value)]
    if required:
        raise unkeyable(path, value, "import what you use from it by name (from module import name), so that its value is known")
    return None


def _is_library(top: str) -> bool:
    """Whether a package was installed, as opposed to being edited where it lies."""
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and _in_library(file)


@functools.lru_cache(maxsize=1024)
def _in_library(file: str) -> bool:
    return any(folder in Path(file).parts for folder in _LIBRARY_FOLDERS)


def _library_version(top: str, path: str, value: object) -> str:
    version = getattr(sys.modules.get(top), "__version__", None)
    if version is not None:
        return str(version)
    from importlib import metadata

    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        raise unkeyable(path, value, f"package {top} has no version that could be part of the key; copy what you use from it") from None
