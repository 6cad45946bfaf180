"""Products of one row in Triton against torch: on a GPU, or in Triton's interpreter; ``test_attention.py`` runs this file."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from meshfold.inference.products_triton import product
from meshfold.inference.quantize import _largest, pack, unpack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    random = torch.Generator().manual_seed(0)
    forms: list[str | None] = [None, "int8", "int4", *(["fp8"] if DEVICE.type == "cuda" else [])]
    sizes = [(5, 48), (2050, 32), (3, 4160)] if DEVICE.type == "cuda" else [(5, 48), (3, 4160)]
    for form, (n, k), biased in itertools.product(forms, sizes, (False, True)):
        for dtype in (torch.float32, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32,):
            x, weight, bias = (torch.randn(*s, generator=random).to(DEVICE, dtype) for s in ((1, 1, k), (n, k), (n,)))
            given = bias if biased else None
            if form is None:
                wanted, found = F.linear(x.double(), weight.double()), product(x, weight, given)
            else:
                codes, scale = pack(weight, form, 16, _largest(weight, form, 16))
                wanted = F.linear(x.double(), unpack(codes, scale, torch.float64))
                found = product(x, codes, given, scale)
            wanted = wanted + bias.double() if biased else wanted
            error = float((found.double() - wanted).abs().max() / wanted.abs().max())
            assert found.shape == (1, 1, n) and error < (1e-5 if dtype == torch.float32 else 2e-2), (form, n, k, error)


if __name__ == "__main__":
    main()
    print("agrees")
