"""The picture of the studio's page, `python -m docs.site.studio`: one switch, from IBC's chains to correct ones.

It needs Chromium.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

import cebm
from cebm.studio import Desk, Subject
from cebm.studio.server import StudioServer
from tests.browser import browser

OUT = Path(__file__).parents[2] / "docs/studio.png"
WIDTH = 1500
"""Of the picture; the two views are side by side in it."""


def main(steps: int = 300) -> None:
    """Trains a policy, opens the studio on it and takes the picture."""
    task = cebm.ParticleTask()
    data = task.demonstrations(300, 0)
    torch.manual_seed(0)
    policy = cebm.fit(data, trial="uniform", steps=steps, limits=task.limits)
    desk = Desk([Subject("uniform", policy, demonstrations=data, task=task)])
    with TemporaryDirectory() as folder, StudioServer(desk) as server, browser() as page:
        page.look(1024, 700)
        page.open(server.url)
        views = []
        for way in ("ibc", "correct"):
            searched = "Number(document.querySelector('#words').dataset.ready || 0)"
            page.until("Number(document.querySelector('#landscape').dataset.ready) > 0")
            page.until(f"{searched} > 0")
            before = page.run(searched)
            page.run(f"document.querySelector('[name=way][value={way}]').click()")
            page.until(f"{searched} > {before}")
            page.run(
                "document.querySelector('#latency').textContent = ''"
            )  # that of the machine that takes the picture
            page.picture(Path(folder) / f"{way}.png")
            views.append(Image.open(Path(folder) / f"{way}.png").convert("RGB"))
        both = Image.new("RGB", (sum(view.width for view in views), views[0].height))
        for k, view in enumerate(views):
            both.paste(view, (k * view.width, 0))
        small = both.resize((WIDTH, both.height * WIDTH // both.width), Image.Resampling.LANCZOS)
        small.quantize(256, dither=Image.Dither.NONE).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
