"""An image classifier behind a Batcher: a bare PyTorch module, images of one size, one label each.

    python examples/classify_images.py [--images 400]

A small convolutional network is trained here, in seconds, to tell circles, squares and crosses apart. Then clients send one
image at a time, at random moments, and the network sees batches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime import SLO, Batcher, RequestRecord, StepRecord

SHAPES = ("circle", "square", "cross")
SIDE = 24


def draw(kind: int, generator: torch.Generator) -> Tensor:
    """One grey image ``[1, SIDE, SIDE]`` of a shape somewhere, some size, on noise."""
    centre = 8 + 8 * torch.rand(2, generator=generator)
    radius = 4 + 3 * float(torch.rand(1, generator=generator))
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    dy, dx = (y - centre[0]).abs(), (x - centre[1]).abs()
    if SHAPES[kind] == "circle":
        inside = dy**2 + dx**2 <= radius**2
    elif SHAPES[kind] == "square":
        inside = torch.maximum(dy, dx) <= radius * 0.9
    else:
        inside = (torch.minimum(dy, dx) <= radius / 3) & (torch.maximum(dy, dx) <= radius)
    return inside.float().unsqueeze(0) + 0.3 * torch.randn(1, SIDE, SIDE, generator=generator)


class SmallNet(nn.Module):
    """Three convolutions with batch normalisation, then the mean over the image and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(images).mean((2, 3)))
        return found


def train(steps: int, generator: torch.Generator) -> SmallNet:
    torch.manual_seed(0)
    model = SmallNet(len(SHAPES))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        kinds = torch.randint(len(SHAPES), (48,), generator=generator)
        loss = F.cross_entropy(model(torch.stack([draw(int(k), generator) for k in kinds])), kinds)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


class Figures:
    """Hears of every call and every image."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.seconds: list[float] = []

    def on_step(self, record: StepRecord) -> None:
        self.calls.append(record.chunks)

    def on_request(self, record: RequestRecord) -> None:
        if record.e2e is not None:
            self.seconds.append(record.e2e)


async def send(batcher: Any, images: list[Tensor], rate: float) -> list[Tensor]:
    """Each image at a random moment, ``rate`` a second, whatever became of the others."""
    rng = random.Random(1)
    asked = []
    for image in images:
        asked.append(asyncio.ensure_future(asyncio.wrap_future(batcher.submit(image))))
        await asyncio.sleep(rng.expovariate(rate))
    return await asyncio.gather(*asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rate", type=float, default=400.0, help="images a second")
    parser.add_argument("--steps", type=int, default=80, help="of training")
    parser.add_argument("--slo", default="e2e=250ms@99%", help="what is promised; what cannot keep it is refused")
    args = parser.parse_args()
    try:
        slo = SLO.parse(args.slo)
    except ValueError as error:
        parser.error(f"--slo: {error}")

    generator = torch.Generator().manual_seed(0)
    model = train(args.steps, generator)
    kinds = [i % len(SHAPES) for i in range(args.images)]
    images = [draw(kind, generator) for kind in kinds]

    figures = Figures()
    with Batcher(model, slo=slo) as batcher:  # a module: stacked inputs, one row of output each
        batcher.subscribe(figures)
        logits = asyncio.run(send(batcher, images, args.rate))

    right = sum(int(row.argmax()) == kind for row, kind in zip(logits, kinds, strict=True))
    print(f"{right} of {len(kinds)} images told right")
    seconds = sorted(figures.seconds)
    print(
        f"{len(figures.calls)} calls of {len(kinds) / len(figures.calls):.1f} images; "
        f"p50 {seconds[len(seconds) // 2] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
