"""Writes entmax_table.json: weights and gradients by the ``entmax`` package, which needs torch.

pip install torch entmax==1.3
python tests/normalizers/make_entmax_table.py
"""

import json
from pathlib import Path

import entmax
import torch

TABLE = Path(__file__).with_name("entmax_table.json")


def functions():
    yield "sparsemax", None, lambda s: entmax.sparsemax(s, dim=-1)
    yield "entmax15", None, lambda s: entmax.entmax15(s, dim=-1)
    for alpha in (1.1, 1.4, 1.8):
        a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        yield "entmax", a, lambda s, a=a: entmax.entmax_bisect(s, alpha=a, dim=-1, n_iter=100)


def main():
    torch.manual_seed(0)
    logits = torch.randn(4, 9, dtype=torch.float64) * torch.tensor([[0.3], [1.0], [4.0], [0.0]])
    cotangent = torch.randn(4, 9, dtype=torch.float64)
    cases = []
    for name, alpha, function in functions():
        s = logits.clone().requires_grad_()
        weights = function(s)
        weights.backward(cotangent)
        case = {"name": name, "weights": weights.tolist(), "d_logits": s.grad.tolist()}
        if alpha is not None:
            case |= {"alpha": alpha.item(), "d_alpha": alpha.grad.item()}
        cases.append(case)
    table = {"logits": logits.tolist(), "cotangent": cotangent.tolist(), "cases": cases}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
