"""The static cycle counter on small programs written by hand; no libtpu is needed."""

import numpy as np
import pytest

from attnorm.bench import bundles, cycles, hlo_tables, scalar_unit
from attnorm.bench.bundles import Operation
from attnorm.bench.scalar_unit import TRANSFER_LATENCY
from attnorm.bench.topology import CompiledKernel


def program(*lines):
    """A dump of these bundles; a line may have a label before its brace, and comments."""
    text = "= control target key start\nLB: loop body\n= control target key end\n\n"
    for address, line in enumerate(lines):
        label, _, body = line.rpartition("|")
        text += (
            f"{address:#6x} {label:3}: > {{ {body} }}\n" if address else f"     0 {label:3}:  {{ {body} }}\n"
        )
    return text


def run(*lines, tables=None, bytes_per_cycle=32.0, cores=1):
    return scalar_unit.run(bundles.parse(program(*lines)), tables or {}, bytes_per_cycle, cores)


# What dumps show: a branch acts after four more bundles, and 512 x 128 numbers of 16 bits are 4096 granules.
EMPTY = [""] * 4
GRANULE_BYTES = 32
LOOP = (
    "%s1_s0 = smov 0 ;; %s2_s7 = smov 5 /* copy for cssa */",
    "LB|%s3_s0 = sphi %s1_s0, %s4_s0 /* phi copy */ ;; %4 = vst [vmem:[#allocation2]] %v1_v1 /* Start region 3 */",
    "%s4_s0 = sadd.s32 1, %s3_s0 ;; %v5_v2 = vadd.f32 %v1_v1, %v1_v1",
    "%p6_p1 = scmp.ge.s32.totalorder %s4_s0, 4 /* loop exit test */",
    "%7 = sbr.rel (!%p6_p1) target = $region3",
    *EMPTY,
    "PF|%8 = vst [vmem:[#allocation3 + $0x8]] %v5_v2",
)


def test_operations_are_read():
    text = program(
        "%17 = dma.hbm_to_vmem [thread:$0]  (!%p18_p11), /*hbm=*/%s309_s6, /*size_in_granules=*/4096, "
        "/*vmem=*/%s311_s25, /*dst_syncflagno=*/[#allocation9 + $0x1] /* two\nlines */",
        "%35 = sst [smem:[#allocation6_spill]] (%p2_p3), %s34_s2 ;; %s38_s6 = smov (!%p39_p0, %s16_s6), 511",
        "%s9_s4 = int_to_ptr.vmem [resolvable:$true] %s8_s4 ;; %s7_s2 = scalar_lea.vmem %s1_s3, %s2_s4 [#allocation8]",
        "%s5_s1 = inlined_call_operand.<no memory space> [shape: s32[1], index: 1, kind: input, shape index: {}] ;; "
        "%10 = vmatmul.mubr.bf16.gmra.mxu1 %v3_v3 ;; %s6_s2 = spop %10",
    )
    transfer, (store, move), (pointer, address), (operand, pop) = (
        bundle.scalar for bundle in bundles.parse(text).bundles
    )
    assert transfer == (
        Operation(
            None, "dma.hbm_to_vmem", "!p11", ("%s309_s6", "4096", "%s311_s25", "[#allocation9 + $0x1]")
        ),
    )
    assert store == Operation(None, "sst", "p3", ("[smem:[#allocation6_spill]]", "%s34_s2"))
    assert move == Operation("s6", "smov", "!p0", ("511",))
    assert pointer == Operation("s4", "int_to_ptr.vmem", None, ("%s8_s4",))
    assert address == Operation("s2", "scalar_lea.vmem", None, ("%s1_s3", "%s2_s4"))
    assert operand == Operation("s1", "operand.value", None, ("input", "1"))
    assert pop == Operation("s2", "spop", None, ("%10",))
    assert bundles.parse(text).bundles[3].matmuls == ("vmatmul.mubr.bf16.gmra.mxu1",)


def test_regions_start_where_comments_say():
    text = program(
        "/* Start/End empty region 4 :: Start region 5 :: End region 5 */", "%1 = sfence /* Start region 6 */"
    )
    assert bundles.parse(text).regions == {4: 0, 5: 0, 6: 1}


def test_the_exit_bundle_is_the_region_without_a_start():
    branch = "%7 = sbr.rel target = $region9"
    assert bundles.parse(program(branch, *EMPTY, "/* exit bundle */")).regions == {9: 5}
    with pytest.raises(ValueError, match=r"regions \[9, 11\], which start nowhere"):
        bundles.parse(program(branch, "%8 = sbr.rel target = $region11"))


def test_a_bundle_that_is_not_recognised_is_named():
    with pytest.raises(ValueError, match="bundle 0x1 is missing, the next is 0x2"):
        bundles.parse(program("", "", "").replace("0x1 ", "??? "))
    with pytest.raises(ValueError, match="no bundles"):
        bundles.parse("nothing here")


def test_a_loop_is_counted_with_the_bundles_after_its_branch():
    (core,) = run(*LOOP)
    assert core.counts == [1, 4, 4, 4, 4, 4, 4, 4, 4, 1]
    assert core.stall_cycles == 0 and core.cycles == sum(core.counts)


def test_operations_of_a_bundle_read_before_any_writes():
    """The registers are swapped, and what was read last decides the branch over bundle 7."""
    lines = (
        "%s1_s0 = smov 0 ;; %s2_s1 = smov 3",
        "%s3_s0 = smov %s2_s1 ;; %s4_s1 = smov %s1_s0",
        "%p5_p0 = scmp.eq.s32.totalorder %s3_s0, 3 ;; %p6_p1 = scmp.eq.s32.totalorder %s4_s1, 0",
        "%p7_p2 = pnand %p5_p0, %p6_p1",
        "%8 = sbr.rel (!%p7_p2) target = $region1",
        *EMPTY,
        "",
        "/* Start region 1 */",
    )
    assert run(*lines)[0].counts == [1] * 9 + [0, 1]


def test_predicated_operations_keep_the_old_value():
    def count(condition):
        return run(
            "%s1_s0 = smov 0 ;; %s2_s1 = smov 7",
            f"%p3_p0 = scmp.{condition}.s32.totalorder %s1_s0, 0",
            "%s4_s1 = smov (%p3_p0, %s2_s1), 8",
            "%p5_p1 = scmp.eq.s32.totalorder %s4_s1, 8",
            "%6 = sbr.rel (%p5_p1) target bundleno = 10",
            *EMPTY,
            "",
            "",
        )[0].counts[9]

    assert count("eq") == 0 and count("ne") == 1


@pytest.mark.parametrize(
    "operation, expected",
    [
        ("sadd.s32 4294967295, 5", 4),
        ("ssub.s32 3, 5", -2),
        ("smul.u32 3, 5", 15),
        ("sshll.u32 3, 4", 48),
        ("sshra.s32 4294967280, 2", -4),
        ("sshrl.u32 4294967280, 28", 15),
        ("sand.u32 6, 12", 4),
        ("sor.u32 6, 12", 14),
        ("smin.u32 6, 12", 6),
        ("scalar_lea.vmem 6, 12", 18),
        ("scalar_select 1, 5, 6", 5),
        ("sld [smem:[#allocation3 + $0x2]]", 41),
        ("sld [smem:[#allocation3]]", 0),
    ],
)
def test_arithmetic(operation, expected):
    """The branch is taken, and the last but one bundle left out, if the result is as expected."""
    (core,) = run(
        "%0 = sst [smem:[#allocation3 + $0x2]] 41",
        f"%s1_s0 = {operation}",
        f"%p2_p0 = scmp.eq.s32.totalorder %s1_s0, {expected}",
        "%3 = sbr.rel (%p2_p0) target = $region1",
        *EMPTY,
        "",
        "/* Start region 1 */",
    )
    assert core.counts[-2:] == [0, 1]


def test_data_are_taken_to_be_ordinary():
    """A sum of magnitudes that the vector unit hands over is small, and a count of infinities is 0."""
    (core,) = run(
        "%s1_s0 = spop %v1_v1 ;; %s2_s1 = spop %v2_v2",
        "%p3_p0 = scmp.lt.f32.partialorder %s1_s0, 1.1258999e+15 ;; %p4_p1 = scmp.eq.f32.partialorder %s2_s1, 0.0",
        "%p5_p2 = pnand %p3_p0, %p4_p1",
        "%6 = sbr.rel (!%p5_p2) target = $region1",
        *EMPTY,
        "/* the slow path */",
        "/* Start region 1 */",
    )
    assert core.counts[-2:] == [0, 1]


def test_transfers_take_turns_and_waits_end_when_all_has_arrived():
    start = "%1 = dma.hbm_to_vmem %s1_s1, /*size_in_granules=*/{}, %s2_s2, /*dst_syncflagno=*/[#allocation{}]"
    (core,) = run(
        start.format(100, 4),
        start.format(60, 5),
        "%2 = dma.done.wait [#allocation4], 100",
        "%3 = dma.done.wait [#allocation5], 60",
        "%4 = dma.done.wait [#allocation5], 60",  # nothing left to wait for
        bytes_per_cycle=GRANULE_BYTES / 2,
    )
    # Two cycles a granule: the first is there at 200 + latency, the second 120 cycles later.
    first = 200 + TRANSFER_LATENCY - 2
    assert core.stall_cycles == first + (120 - 1)
    assert core.transferred_bytes == 160 * GRANULE_BYTES
    assert core.cycles == 5 + core.stall_cycles


TABLE_LOOP = (
    "%s1_s1 = inlined_call_operand.hbm [shape: s32[4], index: 2, kind: input, shape index: {}]",
    "%s2_s1 = sshll.u32 %s1_s1, 4 ;; %s3_s2 = smov [#allocation6] ;; %s4_s5 = smov 0",
    "%5 = dma.hbm_to_smem %s2_s1, 16, %s3_s2, [#allocation1]",
    "%6 = dma.done.wait [#allocation1], 16",
    "LB|%s7_s5 = sphi %s4_s5, %s8_s5 /* Start region 2 */",
    "%s8_s5 = sadd.s32 1, %s7_s5 ;; %s9_s6 = sld [smem:[#allocation6 + %s7_s5]]",
    "%p10_p0 = scmp.eq.s32.totalorder %s9_s6, 0",
    "%11 = sbr.rel (!%p10_p0) target = $region2",
    *EMPTY,
)


def test_tables_decide_how_often_a_loop_runs():
    assert run(*TABLE_LOOP, tables={2: [7, 7, 0, 7]})[0].counts[4] == 3
    assert run(*TABLE_LOOP, tables={2: [0]})[0].counts[4] == 1
    with pytest.raises(ValueError, match="scalar operand 2 of the kernel is not a constant"):
        run(*TABLE_LOOP)


def test_each_core_knows_its_number():
    first, second = run(
        "%s1_s0 = sld [smem:[#allocation0]]",
        "%p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0",
        "%3 = sbr.rel (%p2_p0) target = $region4",
        *EMPTY,
        "",
        "/* exit bundle */",
        cores=2,
    )
    assert first.counts[-2:] == [1, 1] and second.counts[-2:] == [0, 1]


def test_the_first_core_fetches_tables_for_both():
    """The second core leaves out the transfer, and finds the table all the same."""
    lines = (
        "%s1_s0 = sld [smem:[#allocation0]]",
        "%p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0",
        "%3 = sbr.rel (%p2_p0) target = $region1 ;; %s2_s2 = smov [#allocation6]",
        "%s1_s1 = inlined_call_operand.hbm [shape: s32[4], index: 0, kind: input, shape index: {}]",
        *EMPTY[1:],
        "%5 = dma.hbm_to_smem %s1_s1, 16, %s2_s2, [#allocation1]",
        "%s6_s6 = sld [smem:[#allocation6 + $0x1]] /* Start region 1 */",
        "%p7_p1 = scmp.eq.s32.totalorder %s6_s6, 9",
        "%8 = sbr.rel (%p7_p1) target = $region2",
        *EMPTY,
        "",
        "/* Start region 2 */",
    )
    first, second = run(*lines, tables={0: [0, 9]}, cores=2)
    assert first.counts[7] == 1 and second.counts[7] == 0
    assert first.counts[-2] == second.counts[-2] == 0


@pytest.mark.parametrize(
    "line, message",
    [
        ("%s1_s0 = sfrobnicate 1, 2", "unknown operation of the scalar unit.*sfrobnicate"),
        ("%s1_s0 = smov banana", "banana"),
        ("%1 = sbr.rel target = somewhere", "unknown target of a branch"),
        ("%s1_s0 = sphi %s2_s1", "unknown operation.*sphi"),
    ],
)
def test_what_is_not_understood_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        run(line)


def test_matrix_units_given_too_much_add_cycles():
    """Three products of 16 rows in one of two bundles that are issued four times."""
    matmul = "%{0} = vmatmul.mubr.bf16.gmra.mxu{0} %v1_v1"
    lines = list(LOOP)
    lines[2] += " ;; " + " ;; ".join(matmul.format(unit) for unit in (0, 0, 0, 1))
    kernel = CompiledKernel("k", program(*lines), 4096, {})
    counted = cycles.count_cycles(kernel, cycles.Chip("none", 1, 100.0, 1))
    block = len(lines) - 2  # the loop
    assert counted.issue == 4 * block + 2
    assert counted.matmul_excess == 4 * (48 - block)
    assert counted.total == counted.compute == 4 * 48 + 2
    assert counted.matmul_share == pytest.approx(4 * 48 / counted.total)
    faster = cycles.count_cycles(kernel, cycles.Chip("none", 1, 100.0, 2))
    assert faster.matmul_excess == 4 * (24 - block)


def test_bundles_behind_a_branch_do_not_hide_what_came_before():
    """Though the branch is never taken, so that all are issued once."""
    matmul = "%1 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v1"
    branch = "%p1_p0 = scmp.ne.s32.totalorder 1, 1", "%2 = sbr.rel (%p1_p0) target = $region1"
    lines = (matmul, *branch, *EMPTY, *[""] * 100, "/* Start region 1 */")
    kernel = CompiledKernel("k", program(*lines), 0, {})
    assert cycles.count_cycles(kernel, cycles.Chip("none", 1, 100.0, 1)).matmul_excess == 16 - 7


def test_tables_of_kernels_are_found_behind_copies():
    hlo = """
ENTRY %main {
  %constant.1 = s32[3]{0:T(128)} constant({1, -2, 3})
  %copy.2 = s32[3]{0:T(128)S(1)} copy(%constant.1)
  %param = bf16[8,128]{1,0} parameter(0)
  %constant.3 = pred[2]{0} constant({false, true})
  %late = s32[1]{0} parameter(1)
  ROOT %kernel.7 = (f32[8,128]{1,0}, s32[]) custom-call(%copy.2, %param, %constant.3, %late), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[3]{0}}
  %other = f32[] custom-call(%param), custom_call_target="something_else"
}
"""
    tables = hlo_tables.kernel_tables(hlo)
    assert set(tables) == {"kernel.7"} and set(tables["kernel.7"]) == {0, 2}
    assert tables["kernel.7"][0] == [1, -2, 3] + [0] * 125
    assert tables["kernel.7"][2] == [0x100]


def test_tables_are_laid_out_as_hlo_says():
    """Four rows share a word, and tiles have 8 rows of 128: an element's byte by its formula."""
    values = np.arange(2 * 5 * 130) % 100
    words = hlo_tables.words(values.tolist(), "s8", "2,5,130", "2,1,0", "T(8,128)(4,1)")
    data = np.array(words, "<i4").view(np.int8)
    assert data.size == 2 * 8 * 256
    for (a, b, c), value in np.ndenumerate(values.reshape(2, 5, 130)):
        tile = a * 2 + c // 128
        assert data[tile * 1024 + (b // 4) * 512 + (c % 128) * 4 + b % 4] == value
    swapped = hlo_tables.words([1, 2, 3, 4, 5, 6], "s32", "2,3", "0,1", None)
    assert swapped == [1, 4, 2, 5, 3, 6]
