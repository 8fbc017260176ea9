"""GPU architectures: what each compile target offers, every number with its source.

Records are per compile target (``sm_100a``), because that is what a kernel is built for; numbers that belong to a product
rather than to the target (SM count, clock, caches, memory) describe the one product named in ``Arch.part``.
Importing this module loads neither torch nor cutlass, so that configs and cost models can be computed anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from fa4.errors import BackendError

Family = Literal["ampere", "hopper", "blackwell"]


@dataclass(frozen=True)
class Quantity:
    """A number, its unit, and the document (title, section or table) or the arithmetic it comes from.

    Doubt belongs in ``source``: it says when documents disagree, and when a figure is derived from the peak that it explains.
    """

    value: float
    unit: str
    source: str

    def __int__(self) -> int:
        """Return the value of a count or a size; exact, because every such value is a whole number."""
        return int(self.value)

    def __float__(self) -> float:
        """Return the value in ``unit``."""
        return float(self.value)


@dataclass(frozen=True)
class Arch:
    """One compile target.

    ``family`` names the kernels that serve it: sm_86, sm_89 and sm_120a have no WGMMA and no tcgen05, so they run the Ampere kernels.
    Throughputs are per SM and clock. ``boost_clock`` is the clock at which ``bf16_peak`` holds; on parts that
    clock down under tensor load it is lower than the highest clock that tools report.
    """

    name: str
    family: Family
    capability: tuple[int, int]
    part: str
    sm_count: Quantity
    boost_clock: Quantity
    smem_per_sm: Quantity
    smem_per_block: Quantity
    registers_per_sm: Quantity
    registers_per_thread: Quantity
    threads_per_sm: Quantity
    blocks_per_sm: Quantity
    tmem_lanes: Quantity
    tmem_columns: Quantity
    bf16_flop: Quantity
    exp2: Quantity
    fp32_fma: Quantity
    alu: Quantity
    smem_bandwidth: Quantity
    l2: Quantity
    dram_bandwidth: Quantity
    bf16_peak: Quantity


_KB = 1024
_MB = 1024 * 1024

# Documents cited more than once. A source string is one entry of the list of sources in the documentation.
_LIMITS = "CUDA Programming Guide 13, Compute Capabilities, Tables 30 and 31; CCCL cuda/__device/arch_traits.h agrees"
_RATES = "CUDA C++ Best Practices Guide 13, Throughput of Native Arithmetic Instructions"
_ALU = (
    f"{_RATES}: compare, minimum, maximum; shift. The compiler agrees: ptxas leaves two clocks between two such instructions of a warp, "
    "as it does for 16 lanes in each quarter of the SM (seen for sm_80, sm_90a, sm_100a and sm_120a)"
)
_BANKS = "Arithmetic: 32 banks (CUDA Programming Guide 13, Table 31) x 4 bytes per bank and clock"
_TMEM = "PTX ISA 9.4, tcgen05, Tensor Memory addressing: 128 lanes x 512 columns of 32 bits"
_NO_TMEM = "PTX ISA 9.4, tcgen05 target notes: no Tensor Memory on sm_8x, sm_90a and sm_12x"
_A100 = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, comparison of data center GPUs and A100 SM Architecture"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2.0, GA10x SM and Appendix C (RTX A6000)"
_L40S = "NVIDIA L40S data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, Table 3 and H100 SM Architecture"
_FA3 = "FlashAttention-3 (arXiv 2407.08608), Pingpong scheduling: 3.9 T special functions/s on H100 SXM5 = 16 x 132 x 1.83 GHz"
_FA4 = "FlashAttention-4 (arXiv 2603.05451), section 3.1.1"
_B200 = "Chips and Cheese, Nvidia's B200: Keeping the CUDA Juggernaut Rolling; NVIDIA publishes no SM count in the HGX documents"
_BRIEF = "NVIDIA Blackwell Architecture Technical Brief v2.1, system specifications of HGX B300 and HGX B200"
_BLACKWELL_CLOCK = (
    "Arithmetic, not published: 2.25e15 FLOP/s / (148 SMs x 8192 FLOP), so bf16_peak is no independent check of it; "
    "the fp32 peak of 75 TFLOPS for B300 in the Technical Brief v2.1 implies 1.98 GHz without tensor load"
)
_RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet and launch listings: 24064 cores of 128 per SM"

_REGISTERS = Quantity(64 * _KB, "register", _LIMITS)
_REGISTERS_PER_THREAD = Quantity(255, "register", _LIMITS)
_THREADS_1536 = Quantity(1536, "thread", _LIMITS)
_THREADS_2048 = Quantity(2048, "thread", _LIMITS)
_BLOCKS_16 = Quantity(16, "block", _LIMITS)
_BLOCKS_24 = Quantity(24, "block", _LIMITS)
_BLOCKS_32 = Quantity(32, "block", _LIMITS)
_SMEM_100 = Quantity(100 * _KB, "byte", _LIMITS)
_SMEM_99 = Quantity(99 * _KB, "byte", _LIMITS)
_SMEM_228 = Quantity(228 * _KB, "byte", _LIMITS)
_SMEM_227 = Quantity(227 * _KB, "byte", _LIMITS)
_TMEM_LANES = Quantity(128, "lane", _TMEM)
_TMEM_COLUMNS = Quantity(512, "column", _TMEM)
_NO_TMEM_LANES = Quantity(0, "lane", _NO_TMEM)
_NO_TMEM_COLUMNS = Quantity(0, "column", _NO_TMEM)
_EXP2_16 = Quantity(16, "result/clock/SM", _RATES)
_FMA_128 = Quantity(128, "FMA/clock/SM", _RATES)
_ALU_64 = Quantity(64, "result/clock/SM", _ALU)
_SMEM_128 = Quantity(128, "byte/clock/SM", _BANKS)

_SM_80 = Arch(
    name="sm_80",
    family="ampere",
    capability=(8, 0),
    part="A100 SXM4 80 GB",
    sm_count=Quantity(108, "SM", _A100),
    boost_clock=Quantity(1.410e9, "Hz", _A100),
    smem_per_sm=Quantity(164 * _KB, "byte", _LIMITS),
    smem_per_block=Quantity(163 * _KB, "byte", _LIMITS),
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_2048,
    blocks_per_sm=_BLOCKS_32,
    tmem_lanes=_NO_TMEM_LANES,
    tmem_columns=_NO_TMEM_COLUMNS,
    bf16_flop=Quantity(2048, "FLOP/clock/SM", _A100),
    exp2=_EXP2_16,
    fp32_fma=Quantity(64, "FMA/clock/SM", _RATES),
    alu=_ALU_64,
    smem_bandwidth=_SMEM_128,
    l2=Quantity(40 * _MB, "byte", _A100),
    dram_bandwidth=Quantity(2.039e12, "byte/s", "NVIDIA A100 data sheet, A100 80GB SXM; the 40 GB part has 1.555e12"),
    bf16_peak=Quantity(312e12, "FLOP/s", _A100),
)

_SM_86 = Arch(
    name="sm_86",
    family="ampere",
    capability=(8, 6),
    part="RTX A6000",
    sm_count=Quantity(84, "SM", _GA102),
    boost_clock=Quantity(1.800e9, "Hz", _GA102),
    smem_per_sm=_SMEM_100,
    smem_per_block=_SMEM_99,
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_1536,
    blocks_per_sm=_BLOCKS_16,
    tmem_lanes=_NO_TMEM_LANES,
    tmem_columns=_NO_TMEM_COLUMNS,
    bf16_flop=Quantity(1024, "FLOP/clock/SM", f"{_GA102}; GeForce parts of sm_86 accumulate in float32 at half this rate"),
    exp2=_EXP2_16,
    fp32_fma=_FMA_128,
    alu=_ALU_64,
    smem_bandwidth=Quantity(128, "byte/clock/SM", _GA102),
    l2=Quantity(6 * _MB, "byte", _GA102),
    dram_bandwidth=Quantity(768e9, "byte/s", _GA102),
    bf16_peak=Quantity(154.8e12, "FLOP/s", _GA102),
)

_SM_89 = Arch(
    name="sm_89",
    family="ampere",
    capability=(8, 9),
    part="L40S",
    sm_count=Quantity(142, "SM", f"{_L40S}: 18176 cores of 128 per SM"),
    boost_clock=Quantity(2.520e9, "Hz", "Hardware listings; the data sheet's 91.6 TFLOPS fp32 / (142 SMs x 256 FLOP) implies the same"),
    smem_per_sm=_SMEM_100,
    smem_per_block=_SMEM_99,
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_1536,
    blocks_per_sm=_BLOCKS_24,
    tmem_lanes=_NO_TMEM_LANES,
    tmem_columns=_NO_TMEM_COLUMNS,
    bf16_flop=Quantity(
        1024,
        "FLOP/clock/SM",
        f"Arithmetic: 733e12 sparse ({_L40S}) / 2 / (142 SMs x 2.52 GHz); GeForce parts and the L40 (181.05 TFLOPS) have half this rate",
    ),
    exp2=_EXP2_16,
    fp32_fma=_FMA_128,
    alu=_ALU_64,
    smem_bandwidth=_SMEM_128,
    l2=Quantity(
        96 * _MB,
        "byte",
        "NVIDIA Ada GPU Architecture whitepaper: 98304 KB in the full AD102. Disputed for the L40S: listings give 48 MB or 96 MB",
    ),
    dram_bandwidth=Quantity(864e9, "byte/s", _L40S),
    bf16_peak=Quantity(362.05e12, "FLOP/s", f"{_L40S}; half of its sparse figure would be 366.5e12"),
)

_SM_90A = Arch(
    name="sm_90a",
    family="hopper",
    capability=(9, 0),
    part="H100 SXM5",
    sm_count=Quantity(132, "SM", _H100),
    boost_clock=Quantity(1.830e9, "Hz", f"{_H100}: boost clock under tensor load; 1.98 GHz otherwise"),
    smem_per_sm=_SMEM_228,
    smem_per_block=_SMEM_227,
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_2048,
    blocks_per_sm=_BLOCKS_32,
    tmem_lanes=_NO_TMEM_LANES,
    tmem_columns=_NO_TMEM_COLUMNS,
    bf16_flop=Quantity(4096, "FLOP/clock/SM", f"{_H100}: twice A100 per SM and clock"),
    exp2=Quantity(16, "result/clock/SM", _FA3),
    fp32_fma=_FMA_128,
    alu=_ALU_64,
    smem_bandwidth=_SMEM_128,
    l2=Quantity(50 * _MB, "byte", _H100),
    dram_bandwidth=Quantity(3.35e12, "byte/s", "NVIDIA H100 data sheet, SXM; H200, otherwise the same, has 4.8e12 (H200 data sheet)"),
    bf16_peak=Quantity(989.4e12, "FLOP/s", _H100),
)

_SM_100A = Arch(
    name="sm_100a",
    family="blackwell",
    capability=(10, 0),
    part="B200 SXM",
    sm_count=Quantity(148, "SM", _B200),
    boost_clock=Quantity(1.856e9, "Hz", _BLACKWELL_CLOCK),
    smem_per_sm=_SMEM_228,
    smem_per_block=_SMEM_227,
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_2048,
    blocks_per_sm=_BLOCKS_32,
    tmem_lanes=_TMEM_LANES,
    tmem_columns=_TMEM_COLUMNS,
    bf16_flop=Quantity(8192, "FLOP/clock/SM", f"{_FA4}; CUTLASS, Blackwell functionality: tcgen05.mma kind::f16 is twice Hopper"),
    exp2=Quantity(16, "result/clock/SM", _FA4),
    fp32_fma=_FMA_128,
    alu=_ALU_64,
    smem_bandwidth=Quantity(128, "byte/clock/SM", _FA4),
    l2=Quantity(126 * _MB, "byte", "NVIDIA Blackwell Tuning Guide, Increased L2 Capacity; Chips and Cheese (B200) reports the same"),
    dram_bandwidth=Quantity(8.0e12, "byte/s", "NVIDIA DGX B200 data sheet: 64 TB/s / 8 GPUs. Disputed: Technical Brief v2.1 has 7.7e12"),
    bf16_peak=Quantity(2.25e15, "FLOP/s", f"{_BRIEF}; FlashAttention-4 (arXiv 2603.05451) uses the same"),
)

_SM_103A = Arch(
    name="sm_103a",
    family="blackwell",
    capability=(10, 3),
    part="B300 SXM",
    sm_count=Quantity(
        148,
        "SM",
        "Public benchmark reports that query an NVIDIA B300 SXM6 AC; NVIDIA publishes only the full GPU's 160 "
        "(Inside NVIDIA Blackwell Ultra), which some software takes for the B300's count",
    ),
    boost_clock=Quantity(1.856e9, "Hz", _BLACKWELL_CLOCK),
    smem_per_sm=_SMEM_228,
    smem_per_block=_SMEM_227,
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_2048,
    blocks_per_sm=_BLOCKS_32,
    tmem_lanes=_TMEM_LANES,
    tmem_columns=_TMEM_COLUMNS,
    bf16_flop=Quantity(8192, "FLOP/clock/SM", f"As sm_100a: the same dense bf16 peak for both parts in {_BRIEF}"),
    exp2=Quantity(
        32,
        "result/clock/SM",
        "NVIDIA blog, Making Softmax More Efficient with NVIDIA Blackwell Ultra: MUFU.EX2 doubled, measured 10024 against 4943 Gop/s",
    ),
    fp32_fma=_FMA_128,
    alu=_ALU_64,
    smem_bandwidth=_SMEM_128,
    l2=Quantity(126 * _MB, "byte", "Taken equal to B200: no NVIDIA figure found; public B300 measurements use it"),
    dram_bandwidth=Quantity(
        8.0e12, "byte/s", "NVIDIA HGX AI Factory, Components: 288 GB part. Disputed: Technical Brief v2.1 has 7.7e12 for the 270 GB part"
    ),
    bf16_peak=Quantity(2.25e15, "FLOP/s", f"{_BRIEF}: half of the sparse 4.5e15, printed dense as 2.2e15; GB300 has 2.5e15"),
)

_SM_120A = Arch(
    name="sm_120a",
    family="ampere",
    capability=(12, 0),
    part="RTX PRO 6000 Blackwell Workstation Edition",
    sm_count=Quantity(188, "SM", _RTX_PRO),
    boost_clock=Quantity(2.617e9, "Hz", "Hardware listings; the data sheet's 125 TFLOPS fp32 / (188 SMs x 256 FLOP) implies 2.60 GHz"),
    smem_per_sm=_SMEM_100,
    smem_per_block=_SMEM_99,
    registers_per_sm=_REGISTERS,
    registers_per_thread=_REGISTERS_PER_THREAD,
    threads_per_sm=_THREADS_1536,
    blocks_per_sm=_BLOCKS_24,
    tmem_lanes=_NO_TMEM_LANES,
    tmem_columns=_NO_TMEM_COLUMNS,
    bf16_flop=Quantity(
        1024,
        "FLOP/clock/SM",
        "Arithmetic: 503.8e12 / (188 SMs x 2.617 GHz); GeForce parts of sm_120 have 512 "
        "(NVIDIA RTX Blackwell GPU Architecture whitepaper, Table 3: 209.5 TFLOPS on the RTX 5090)",
    ),
    exp2=Quantity(16, "result/clock/SM", f"{_RATES}; no independent figure found for 12.0"),
    fp32_fma=_FMA_128,
    alu=_ALU_64,
    smem_bandwidth=_SMEM_128,
    l2=Quantity(128 * _MB, "byte", "Hardware listings and launch reports of the RTX PRO 6000 Blackwell"),
    dram_bandwidth=Quantity(1.792e12, "byte/s", "Arithmetic: 512 bit / 8 x 28 Gbit/s (launch listings of the RTX PRO 6000 Blackwell)"),
    bf16_peak=Quantity(
        503.8e12, "FLOP/s", "Hardware listings; the data sheet's 4000 AI TOPS (sparse fp4) / 8 gives 500e12. No NVIDIA bf16 figure seen"
    ),
)

ARCHS: Final[Mapping[str, Arch]] = MappingProxyType(
    {arch.name: arch for arch in (_SM_80, _SM_86, _SM_89, _SM_90A, _SM_100A, _SM_103A, _SM_120A)}
)
"""Every compile target that has kernels, by name, in the order of compute capability."""


def get_arch(name: str) -> Arch:
    """Return the record of a compile target such as ``"sm_100a"``; raise BackendError for any other name."""
    if isinstance(name, str) and name in ARCHS:
        return ARCHS[name]
    known = ", ".join(ARCHS)
    if isinstance(name, str) and f"{name}a" in ARCHS:
        rule = "the compile target lacks the suffix of the architecture-specific features that the kernels need"
        raise BackendError("arch", name, rule, f"write '{name}a'")
    # Imported here because difflib costs more than this whole module and is of use only to a message.
    from difflib import get_close_matches

    close = get_close_matches(str(name).lower(), ARCHS, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    raise BackendError("arch", name, "not a known compile target", f"{guess}known: {known}")


def arch_for_capability(capability: tuple[int, int]) -> Arch:
    """Return the record of a device of this compute capability (major, minor); raise BackendError where there is none.

    The match is exact. Names with ``a`` run on no other capability. Without it a cubin would run on a higher minor version of
    the same major version, but that guarantee excludes Tegra (CUDA C++ Programming Guide, Binary Compatibility), and all
    other GPUs of major version 8 have a record; so 8.7 (Jetson Orin) is refused rather than given the limits of another part.
    """
    for arch in ARCHS.values():
        if arch.capability == tuple(capability):
            return arch
    major, minor = capability
    same_major = [arch.name for arch in ARCHS.values() if arch.capability[0] == major]
    if major < 8:
        rule = "the kernels need compute capability 8.0 or higher (bf16 tensor cores and asynchronous copies)"
    elif same_major and all(name.endswith("a") for name in same_major):
        rule = f"targets with a suffix ({', '.join(same_major)}) run on exactly one capability, and none is this one"
    elif same_major:
        rule = "binary compatibility across minor versions excludes Tegra, and every other GPU of this major version has a record"
    else:
        rule = "no compile target for this major version"
    known = ", ".join(f"{arch.capability[0]}.{arch.capability[1]} ({arch.name})" for arch in ARCHS.values())
    raise BackendError("capability", f"{major}.{minor}", rule, f"use a GPU with one of {known}, or the CPU backend")


@dataclass(frozen=True)
class TileCycles:
    """Least clocks that each unit of one SM needs for a tile; units overlap, so the largest bounds the tile.

    ``smem`` is None where operand traffic is a property of the kernel rather than of the tile.
    """

    mma: float
    smem: float | None
    exp: float


def forward_tile_cycles(arch: Arch, m: int, n: int, d: int) -> TileCycles:
    """Return the roofline, in clocks, of one forward step of m queries against n keys at head dim d, 16-bit inputs, one CTA.

    - ``mma``: the products Q K^T and P V are 2*m*n*d FLOP each. It assumes the full rate, which Blackwell reaches from m = 128.
    - ``exp``: m*n results of exp2, none of them emulated.
    - ``smem``: operand reads of the tensor cores, on Blackwell. An instruction covers 128 queries by 128 keys: Q is read once
      per 128 keys, K once per 128 queries, V once per 128 queries; P comes from Tensor Memory and the accumulators stay there.
      In bytes: 2*d*(m*ceil(n/128) + 2*n*ceil(m/128)), which for multiples of 128 is 3*m*n*d/8192 clocks at 128 bytes per clock,
      the formula of FlashAttention-4 (arXiv 2603.05451), section 3.1.1. Writes by TMA and the epilogue are left out, as there.
      Elsewhere None: warps (mma.sync) or 64-row warpgroups (WGMMA) each re-read K and V, so that the bytes depend on the layout.
    """
    mma = 4 * m * n * d / arch.bf16_flop.value
    exp = m * n / arch.exp2.value
    if arch.family != "blackwell":
        return TileCycles(mma, None, exp)
    query_tiles, key_tiles = -(-m // 128), -(-n // 128)
    read_bytes = 2 * d * (m * key_tiles + 2 * n * query_tiles)
    return TileCycles(mma, read_bytes / arch.smem_bandwidth.value, exp)
