"""Makes docs/images/watch.png: the page of a run as Chromium draws it. `python tools/page_picture.py RUN FILE.png`."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from PIL import Image
from tests.watch.pages import browser, served, until

from drumbeat.runfolder.run import Run

WIDE, TALL = 1280, 844  # ends below a row of charts
SETTLED = """
return !document.getElementById('heatcard').hidden
    && Object.values(drumbeat.charts).some((chart) => chart.plot.querySelector('.scatterlayer path'))
"""


def main() -> int:
    run, file = sys.argv[1:]
    with tempfile.TemporaryDirectory() as home, served(Run.open(run), home) as page, browser(WIDE, TALL) as driver:
        size = {"width": WIDE, "height": TALL, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        driver.get(page.address)
        assert until(lambda: driver.execute_script(SETTLED)), driver.get_log("browser")
        until(lambda: False, seconds=5)  # charts are drawn one after the other
        driver.save_screenshot(file)
    Image.open(file).quantize(256, dither=Image.Dither.NONE).save(
        file, optimize=True
    )  # flat colours: a third of the size
    return 0


if __name__ == "__main__":
    sys.exit(main())
