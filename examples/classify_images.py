"""An image classifier behind a Batcher: a bare PyTorch module, images of one size, one label each.

    python examples/classify_images.py [--images 400]

A small convolutional network is trained here, in seconds, to tell circles, squares and crosses apart. Then clients send
one image at a time, and the network sees batches.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime import SLO, Batcher, RequestRecord, StepRecord

SHAPES = ("circle", "square", "cross")
SIDE = 24


def draw(kinds: Tensor, generator: torch.Generator) -> Tensor:
    """Grey images ``[n, 1, SIDE, SIDE]`` of shapes somewhere, of some size, on noise."""
    n = len(kinds)
    centre = 7 + (SIDE - 14) * torch.rand(2, n, 1, 1, generator=generator)
    radius = 4 + 2.5 * torch.rand(n, 1, 1, generator=generator)
    grid = torch.arange(SIDE)
    dy, dx = (grid[None, :, None] - centre[0]).abs(), (grid[None, None, :] - centre[1]).abs()
    shapes = (
        dy**2 + dx**2 <= radius**2,
        torch.maximum(dy, dx) <= radius * 0.9,
        (torch.minimum(dy, dx) <= radius / 4) & (torch.maximum(dy, dx) <= radius * 1.1),
    )
    inside = torch.stack(shapes)[kinds, torch.arange(n)].float()
    return (inside + 0.2 * torch.randn(n, SIDE, SIDE, generator=generator)).unsqueeze(1)


class SmallNet(nn.Module):
    """Three convolutions with batch normalisation, then the strongest answer over the image and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(images).amax((2, 3)))
        return found


def train(steps: int, generator: torch.Generator) -> SmallNet:
    torch.manual_seed(0)
    model = SmallNet(len(SHAPES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    for _ in range(steps):
        kinds = torch.randint(len(SHAPES), (64,), generator=generator)
        loss = F.cross_entropy(model(draw(kinds, generator)), kinds)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        slower.step()
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


def clients(batcher: Batcher, images: list[Tensor], count: int) -> list[Tensor]:
    """``count`` clients, each with one image at a time: the next one a moment after the answer."""

    def ask(image: Tensor) -> Tensor:
        time.sleep(random.expovariate(1 / 0.002))
        answer: Tensor = batcher.submit(image).result()
        return answer

    with ThreadPoolExecutor(max_workers=count) as threads:
        return list(threads.map(ask, images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--slo", default="e2e=250ms@99%", help="latency target; what cannot meet it is rejected")
    args = parser.parse_args()
    try:
        slo = SLO.parse(args.slo)
    except ValueError as error:
        parser.error(f"--slo: {error}")
    for name in ("images", "clients", "steps"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")

    generator = torch.Generator().manual_seed(0)
    model = train(args.steps, generator)
    kinds = torch.arange(args.images) % len(SHAPES)
    images = list(draw(kinds, generator))

    figures = Figures()
    with Batcher(model, slo=slo) as batcher:  # a module: stacked inputs, one row of output each
        batcher.subscribe(figures)
        logits = clients(batcher, images, args.clients)

    right = sum(int(row.argmax()) == kind for row, kind in zip(logits, kinds.tolist(), strict=True))
    print(f"{right} of {len(kinds)} images classified right")
    seconds = sorted(figures.seconds)
    print(
        f"{len(figures.calls)} calls of {len(kinds) / len(figures.calls):.1f} images; "
        f"p50 {seconds[len(seconds) // 2] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
