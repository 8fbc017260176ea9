"""``fa4.inspect``: one request, compiled for one architecture without a GPU, and everything that can be read from the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fa4 import dispatch, tuning
from fa4.arch import get_arch
from fa4.compiler import Artifact, get
from fa4.errors import InspectionError, UnsupportedError
from fa4.inspection import ptx
from fa4.inspection.code import Loop, MachineCode, SourceCount, machine_code
from fa4.inspection.histogram import Histogram
from fa4.inspection.resources import Resources, resources
from fa4.inspection.text import comparison_table, histogram_table, resource_table
from fa4.modifier import MaskMod, Modifiers, ScoreMod
from fa4.problem import OPERATIONS, Operation, WindowSize, problem_class


@dataclass(frozen=True, repr=False)
class Report:
    """What a request was compiled to.

    ``problem``, ``config`` and ``toolchain`` say what was compiled, how and by what; ``source`` is the kernel class. ``ptx_histogram``
    counts the PTX instructions of the module. ``code`` is None where nvdisasm could not show the machine code, for the reason in
    ``code_error``; ``sass``, ``histogram``, ``loops``, ``main_loop``, ``annotated`` and ``source_lines`` then raise it.
    """

    kernel: str
    arch: str
    source: str
    problem: Mapping[str, Any]
    config: Mapping[str, Any]
    toolchain: Mapping[str, str]
    resources: Resources
    ptx: str
    ptx_histogram: Histogram
    code: MachineCode | None
    code_error: str | None

    @property
    def sass(self) -> str:
        """Machine code, as nvdisasm lists it."""
        return self._code().text

    @property
    def histogram(self) -> Histogram:
        """SASS instructions by class, the whole kernel, padding after its end included."""
        return self._code().histogram

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops, by address."""
        return self._code().loops

    @property
    def main_loop(self) -> Loop | None:
        """The loop that does the work, see ``MachineCode.main_loop``; None where no loop has a tensor-core product."""
        return self._code().main_loop

    @property
    def annotated(self) -> str:
        """SASS with the Python line above the instructions it became."""
        return self._code().annotated

    @property
    def source_lines(self) -> tuple[SourceCount, ...]:
        """Instructions per Python source line, most first."""
        return self._code().source_lines

    @property
    def title(self) -> str:
        """The request in words."""
        problem = self.problem
        dims = str(problem["head_dim"])
        if problem["head_dim_v"] != problem["head_dim"]:
            dims += f",{problem['head_dim_v']}"
        sides = [side for side, present in zip(("left", "right"), problem["window"], strict=True) if present]
        words = [word for word in ("causal", "softcap", "deterministic") if problem[word]] + [f"window-{side}" for side in sides]
        return " ".join([problem["direction"], problem["dtype"], f"head dim {dims}", *words, self.arch])

    def compare(self, other: Report) -> Comparison:
        """What differs between this report and another, in resources and in instructions by class."""
        rows = _differences("resources", asdict(self.resources), asdict(other.resources))
        rows += _differences("PTX", self.ptx_histogram.counts, other.ptx_histogram.counts, 0)
        if self.code is not None and other.code is not None:
            rows += _differences("SASS", self.histogram.counts, other.histogram.counts, 0)
            if self.main_loop is not None and other.main_loop is not None:
                rows += _differences("main loop", self.main_loop.histogram.counts, other.main_loop.histogram.counts, 0)
        return Comparison(self.title, other.title, tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data."""
        return _plain(self)

    def __str__(self) -> str:
        parts = [
            f"{self.title}\n{self.kernel}, from {self.source}",
            resource_table(self.resources),
            histogram_table(self.code, self.ptx_histogram),
        ]
        if self.code_error is not None:
            parts.append(self.code_error)
        return "\n\n".join(parts)

    __repr__ = __str__

    def _code(self) -> MachineCode:
        if self.code is None:
            raise InspectionError(self.code_error or "")
        return self.code


@dataclass(frozen=True)
class Difference:
    """One number that differs; None where one side has no value. ``section`` is "resources", "PTX", "SASS" or "main loop"."""

    section: str
    name: str
    left: Any
    right: Any


@dataclass(frozen=True, repr=False)
class Comparison:
    """What differs between two reports; false where nothing does."""

    left: str
    right: str
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able data."""
        return _plain(self)

    def __str__(self) -> str:
        if not self:
            return f"{self.left}\n{self.right}\nno difference in resources or instruction counts"
        rows = [(f"{row.section}: {row.name}", row.left, row.right) for row in self.differences]
        return f"left:  {self.left}\nright: {self.right}\n\n{comparison_table(rows)}"

    __repr__ = __str__


def inspect(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: object = "bfloat16",
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    direction: Operation = "forward",
    score_mod: ScoreMod | str | None = None,
    mask_mod: MaskMod | str | None = None,
    arch: str,
) -> Report:
    """What a class of requests is compiled to on an architecture, for example "sm_80". No GPU is needed.

    The arguments are those of ``fa4.supports``; of ``softcap`` and ``window_size`` only the presence matters. ``direction`` may also be
    "preprocess" (by the head dim of v) or "postprocess", what a backward launches around its main kernel. The kernel comes from the compile
    cache, or is compiled now, together with its line table.

    Raises:
        ArgumentError: one of its children: an argument is malformed, or there is no kernel for the request.
        CompileError: the kernel does not compile here.
    """
    target = get_arch(arch)
    modifiers = Modifiers.named(score_mod, mask_mod, "cuda", direction)
    problem = problem_class(
        direction=direction,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        operations=OPERATIONS,
        functions=modifiers.functions_for(direction),
    )
    support = dispatch.kernel_support(problem, arch)
    if not support:
        raise UnsupportedError("arch", arch, support.reason, "`fa4 doctor` lists the kernels there are")
    return report(get(problem, tuning.config(problem, target), arch, line_info=True))


def report(artifact: Artifact) -> Report:
    """The report on an artifact of one kernel. Source lines need an artifact with a line table (``line_info``).

    Raises:
        UnsupportedError: it has several kernels.
    """
    if len(artifact.kernels) != 1:
        names = ", ".join(kernel.name for kernel in artifact.kernels)
        raise UnsupportedError("artifact", names, "a report covers one kernel", "inspect a request that launches one")
    (kernel,) = artifact.kernels
    code, error = None, None
    try:
        code = machine_code(artifact, kernel.name)
    except InspectionError as reason:
        error = str(reason)
    return Report(
        kernel=kernel.name,
        arch=artifact.arch,
        source=artifact.source,
        problem=artifact.problem,
        config=artifact.config,
        toolchain=asdict(artifact.toolchain),
        resources=resources(kernel, get_arch(artifact.arch)),
        ptx=artifact.ptx,
        ptx_histogram=ptx.histogram(artifact.ptx),
        code=code,
        code_error=error,
    )


def _differences(section: str, left: Mapping[str, Any], right: Mapping[str, Any], missing: int | None = None) -> list[Difference]:
    names = dict.fromkeys((*left, *right))
    pairs = ((name, left.get(name, missing), right.get(name, missing)) for name in names)
    return [Difference(section, name, a, b) for name, a, b in pairs if a != b]


def _plain(value: Report | Comparison) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    return data
