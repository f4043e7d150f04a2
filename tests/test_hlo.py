"""Collectives of a program as XLA prints it: loops, asynchronous pairs, and each kind."""

import pytest

from attnorm.hlo import Collective, collectives, traffic

PROGRAM = """HloModule jit_train_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %permute = (bf16[2,16]{1,0:T(8,128)}, bf16[2,16]{1,0:T(8,128)}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %arrived = bf16[2,16]{1,0:T(8,128)} collective-permute-done(%permute)
  ROOT %t = (s32[], f32[8]) tuple(%i, %x)
}

%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %nested = (s32[], f32[8]) while(%p), condition=%less, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %gather = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[8]) tuple(%i, %x)
}

%gathers (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = f32[16]{0} all-gather(%x), channel_id=9, replica_groups=mesh['data'=4,'fsdp'=2] {'fsdp'}, dimensions={0}
  ROOT %t = (s32[], f32[8]) tuple(%i, %x)
}

%below (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6), backend_config={}
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%all-reduce-scatter.4 (input.4: f32[64,2]) -> f32[16,2] {
  %whole = f32[64,2]{1,0} all-reduce(%input.4), channel_id=11, replica_groups=[2,4]<=[8], to_apply=%add.1
  ROOT %slice = f32[16,2]{1,0} dynamic-slice(%whole, %i, %j), dynamic_slice_sizes={16,2}
}

%less (p: (s32[], f32[8])) -> pred[] {
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

%wrapped (x: f32[64]) -> f32[16] {
  ROOT %scatter = f32[16]{0} reduce-scatter(%x), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add.1
}

ENTRY %main.42 (x: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%t), condition=%less, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %start = ((f32[64]), f32[16], s32[]) async-start(%y), calls=%wrapped
  %done = f32[16] async-done(%start), calls=%wrapped
  %part = f32[16,2]{1,0} fusion(%grads), kind=kCustom, calls=%all-reduce-scatter.4
  %third = (s32[], f32[8]) while(%t), condition=%below, body=%gathers
  %sums = (f32[10]{0}, bf16[4]{0}) all-reduce(%u, %v), replica_groups=[1,8]<=[8], to_apply=%add.1
  ROOT %exchanged = f32[8]{0} all-to-all(%x), replica_groups=[4,2]<=[8], dimensions={0}
}
"""


def test_bytes_and_numbers_of_collectives():
    found = {kind: (of.count, of.bytes_sent) for kind, of in traffic(PROGRAM).items()}
    assert found == {
        "all-gather": (3 + 6, pytest.approx(3 * 128 * 3 / 4 + 6 * 64 / 2)),
        "all-reduce": (1, pytest.approx(2 * (40 + 8) * 7 / 8)),
        "reduce-scatter": (2, pytest.approx((4 * 64 + 4 * 128) * 3 / 4)),
        "collective-permute": (15, 15 * 64),
        "all-to-all": (1, pytest.approx(32 / 2)),
    }


# Two transfers in a loop of seven steps, the first beside a kernel, the second waited for; one in a loop of
# three.
LOOP = """
HloModule jit_f, is_scheduled=true, num_partitions=4

%branch (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  ROOT %k = f32[8,4]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="x(y)"}
}

%body (arg: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %arg = (s32[], bf16[8,4]{1,0}) parameter(0)
  %start.1 = (bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) collective-permute-start(%x)
  %cond.1 = f32[8,4]{1,0} conditional(%i, %x, %x), branch_computations={%branch, %other}
  %done.1 = bf16[8,4]{1,0} collective-permute-done(%start.1)
  %start.12 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[]) collective-permute-start(%y)
  %add.1 = f32[8,4]{1,0} add(%x, %x)
  %done.12 = bf16[8,4]{1,0} collective-permute-done(%start.12)
  ROOT %out = (s32[], bf16[8,4]{1,0}) tuple(%i, %done.1)
}

%limit (arg: (s32[], bf16[8,4])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(3), metadata={op_name="jit(f)"}
  %i.2 = s32[] get-tuple-element(%arg), index=0
  ROOT %less = pred[] compare(%i.2, %constant.3), direction=LT
}

%body.2 (arg: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %sent = bf16[2,4]{1,0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
  ROOT %out.2 = (s32[], bf16[8,4]{1,0}) tuple(%i, %y)
}

ENTRY %main (q: bf16[8,4]) -> f32[] {
  %gathered = bf16[32,4]{1,0} all-gather(%q), dimensions={0}
  %loop = (s32[], bf16[8,4]{1,0}) while(%t), condition=%c.1, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %loop.2 = (s32[], bf16[8,4]{1,0}) while(%t), condition=%limit, body=%body.2
  ROOT %sum = f32[] all-reduce(%z), to_apply=%add
}
"""


def test_collectives_are_counted_by_loops_and_seen_beside_work():
    assert collectives(LOOP, "tpu_custom_call") == [
        Collective("all-gather", 256, bytes_sent=192, times=1, is_in_loop=False, is_overlapped=None),
        Collective("collective-permute", 64, bytes_sent=64, times=7, is_in_loop=True, is_overlapped=True),
        Collective("collective-permute", 64, bytes_sent=64, times=7, is_in_loop=True, is_overlapped=False),
        Collective("collective-permute", 16, bytes_sent=16, times=3, is_in_loop=True, is_overlapped=None),
        Collective("all-reduce", 4, bytes_sent=6, times=1, is_in_loop=False, is_overlapped=None),
    ]


def test_all_of_a_tuple_is_sent():
    [one] = collectives("""
ENTRY %main (a: f32[8,4], b: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  ROOT %sums = (f32[8,4], f32[8,4]) all-reduce(%a, %b), replica_groups={{0,1}}, to_apply=%add
}
""")
    assert (one.bytes, one.bytes_sent) == (128, 256)


def test_one_that_waits_in_a_computation_of_its_own_is_counted_once():
    """And runs beside what stands between that computation's start and its end."""
    program = PROGRAM.replace(
        "  %done =", '  %y = f32[8] custom-call(%x), custom_call_target="kernel"\n  %done ='
    )
    of_kind = [one for one in collectives(program, work="kernel") if one.kind == "reduce-scatter"]
    assert [(one.bytes, one.is_overlapped) for one in of_kind] == [(64, True), (512, None)]


def test_collectives_of_one_channel_are_counted_each():
    """As CPUs have them, in loops and beside them."""
    program = LOOP.replace("collective-permute(%y)", "collective-permute(%y), channel_id=1").replace(
        "  ROOT %sum =", "  %other = bf16[2,4]{1,0} collective-permute(%z), channel_id=1\n  ROOT %sum ="
    )
    found = [(one.bytes, one.times) for one in collectives(program) if one.bytes == 16]
    assert found == [(16, 3), (16, 1)]


def test_copies_of_what_is_wrapped_are_counted_once():
    """As TPUs print what starts in one computation and ends in another of the same channel."""
    [wrapped] = [part for part in PROGRAM.split("\n\n") if part.startswith("%wrapped")]
    copy = wrapped.replace("%wrapped", "%wrapped.clone").replace("%scatter", "%scatter.clone")
    program = PROGRAM.replace(wrapped, f"{wrapped}\n\n{copy}").replace(
        "async-done(%start), calls=%wrapped", "async-done(%start), calls=%wrapped.clone"
    )
    assert program.count("calls=%wrapped.clone") == 1
    assert traffic(program) == traffic(PROGRAM)
