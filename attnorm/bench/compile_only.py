"""Compiles our TPU kernels for chips that are not there, and reports the memory and code they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnorm.bench import report, tpu_kernels
from attnorm.bench.topology import compile_for, one_chip


def run(
    topology: str, normalizers: Sequence[str], blocks: Sequence[int], progress: Callable[[str], None]
) -> dict:
    """The report: by row and block, bytes of HBM and of code, and vector memory of each kernel."""
    one_chip(topology)  # a wrong name is an error, not a failure of each row
    result = report.new_report(
        f"compiled for {topology}, not run",
        heads=tpu_kernels.HEADS,
        length=tpu_kernels.LENGTH,
        head_dim=tpu_kernels.HEAD_DIM,
        dtype="bfloat16",
        is_causal=True,
    )
    result |= {"programs": [], "failures": []}
    for row in tpu_kernels.rows(normalizers):
        for block in (None, *blocks):
            label = f"{row}, {'default blocks' if block is None else f'blocks of {block}'}"
            progress(f"{topology}: {label}")
            try:
                subject = tpu_kernels.attention(row, block)
                program = compile_for(topology, subject.function, subject.arguments)
            except Exception as error:  # such as too little vector memory; the others go on
                result["failures"].append(f"{label}: {report.reason(error)}")
                continue
            memory = program.memory
            vmem = {
                direction: max(kernel.vmem_bytes for kernel in program.kernels if part in kernel.name)
                for direction, part in subject.passes.items()
            }
            result["programs"].append(
                {
                    "row": row,
                    "block": block,
                    "vmem_bytes": vmem,
                    "hbm_bytes": {
                        "arguments": memory.argument_size_in_bytes,
                        "outputs": memory.output_size_in_bytes,
                        "temporaries": memory.temp_size_in_bytes,
                    },
                    "code_bytes": memory.generated_code_size_in_bytes,
                }
            )
    return result


def text(result: dict) -> str:
    """The report as a table."""
    header = [
        "MiB",
        "block",
        "VMEM forward",
        "VMEM backward",
        "HBM arguments",
        "outputs",
        "temporaries",
        "code",
    ]
    rows = [header]
    for program in result["programs"]:
        sizes = [*program["vmem_bytes"].values(), *program["hbm_bytes"].values(), program["code_bytes"]]
        block = "default" if program["block"] is None else str(program["block"])
        rows.append([program["row"], block, *(f"{size / 2**20:.1f}" for size in sizes)])
    title = f"\nForward and backward {result['kind']}: {result['settings']}"
    return "\n".join([report.table(title, rows), *(f"failed: {x}" for x in result["failures"])])
