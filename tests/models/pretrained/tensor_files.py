"""Writes safetensors files, by the published format and without the code under test."""

import json

import numpy as np

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "int64": "I64"}


def write_tensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in tensors.items():
        raw = np.ascontiguousarray(x).tobytes()
        header[name] = {
            "dtype": DTYPES[x.dtype.name],
            "shape": x.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_checkpoint(folder, config, tensors, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return folder
    names = [list(tensors)[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for file, part in zip(files, names, strict=True):
        write_tensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in zip(files, names, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
