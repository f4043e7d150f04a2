"""Traffic from a program as XLA prints it: loops, asynchronous pairs, and each kind of collective."""

import pytest

from attnorm.training.collectives import traffic

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
