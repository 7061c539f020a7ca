"""The page in a real browser, as somebody looks at it: no holes, nothing cut, named axes, a hang in red, enough contrast."""

import time

import pytest

from drumbeat.watch.web import outliers
from tests.runfolder.folders import events
from tests.watch.pages import browser, running, served, until
from tests.watch.recorded import gpu, recorded, sample

pytest.importorskip("starlette")
pytest.importorskip("plotly")
keys = pytest.importorskip("selenium.webdriver")

WIDTHS = (1440, 1024, 390)
HANG = {
    "code": "hang-stopped", "severity": "warning", "rank": 1, "cause": "it was stopped by a signal", "fix": "kill -CONT 4711",
    "title": "rank 1 on n000 is stopped, and three ranks wait for it in all_reduce",
}  # fmt: skip
DRAWN = "return Object.values(drumbeat.charts).filter((chart) => chart.plot.querySelector('.scatterlayer path')).length"
# Rows of tiles that do not reach the right edge, boxes whose text is wider than they are, and a page wider than its window.
FLAWS = """
const found = [];
for (const id of ["figures", "charts"]) {
  const box = document.getElementById(id), end = box.getBoundingClientRect().right, rows = new Map();
  for (const child of box.children) {
    if (child.hidden) continue;
    const at = child.getBoundingClientRect();
    rows.set(Math.round(at.top), Math.max(at.right, rows.get(Math.round(at.top)) || 0));
  }
  for (const [top, right] of rows) if (Math.abs(right - end) > 3) found.push(`a hole in #${id} at ${top}: ${right} of ${end}`);
}
for (const box of document.querySelectorAll(".figure *, header *, .trouble *, .list *, .chart h2"))
  if (box.clientWidth && box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflow !== "visible")
    found.push(`cut: ${box.textContent}`);
if (document.documentElement.scrollWidth > innerWidth) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
return found;
"""
AXES = """
return Object.values(drumbeat.charts).filter((chart) => !chart.empty)
  .map((chart) => [chart.plot.layout.xaxis.title.text, chart.plot.layout.yaxis.title.text]);
"""
# Charts without a number along the x axis.
BARE = "return Object.values(drumbeat.charts).some((chart) => !chart.empty && !chart.plot.querySelector('.xtick text'))"
# The least contrast of a number in the heat map with its cell, over all shades and the red of a rank that hangs.
INK = """
const done = arguments[0], pen = document.createElement("canvas").getContext("2d");
function light(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
    .map((v) => (v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
import("/page/heat.js").then(({ ink }) => done(Math.min(...drumbeat.heat.palette.slice(0, 66).map((shade) => {
  pen.fillStyle = shade;
  const pair = [light(pen.fillStyle), light(ink(pen.fillStyle))];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}))));
"""
# WCAG's contrast of each text with what lies behind it.
PALE = """
const canvas = document.createElement("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
canvas.width = canvas.height = 1;
function over(colours) {
  pen.clearRect(0, 0, 1, 1);
  for (const each of colours) { pen.fillStyle = each; pen.fillRect(0, 0, 1, 1); }
  return [...pen.getImageData(0, 0, 1, 1).data];
}
function light([r, g, b]) {
  const part = (v) => (v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
const found = [];
for (const box of document.querySelectorAll("body *")) {
  const own = [...box.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !box.getClientRects().length || box.closest("script, style, [hidden]")) continue;
  const behind = [];
  for (let up = box; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
  const colour = box instanceof SVGElement ? getComputedStyle(box).fill : getComputedStyle(box).color;
  const ratio = [light(over(behind)), light(over([...behind, colour]))].sort((a, b) => b - a);
  const value = (ratio[0] + 0.05) / (ratio[1] + 0.05);
  if (value < 4.5) found.push(`${value.toFixed(2)}: ${box.textContent.trim().slice(0, 40)}`);
}
return [...new Set(found)];
"""


def test_nodes_that_stand_out():
    assert outliers(dict.fromkeys(range(20), 90.0)) == [] and outliers({}) == [] and outliers({0: None}) == []
    assert outliers({**{k: 90.0 + k % 3 for k in range(20)}, 7: 12.0}) == [7]
    assert outliers({**dict.fromkeys(range(20), 100.0), 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}) == [1, 2, 3], (
        "the farthest three"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # Chromium on busy cores takes its time
def test_as_somebody_looks_at_it(tmp_path):
    few = recorded(tmp_path / "few")
    events(few, ("finding", {"finding": HANG}))
    many = recorded(tmp_path / "many", nodes=9, ranks=8, last=4)
    for node in range(9):
        sample(many, node, time.time() - 1.0, [gpu(index, 5.0 if node == 4 else 90.0) for index in range(8)])
    with browser() as driver:
        script = driver.execute_script
        with served(running(few), tmp_path) as page:
            driver.get(page.address)
            assert until(lambda: script(DRAWN) == 7)
            for width in WIDTHS:  # a page that is loaded costs five seconds of CPU time: one for all widths and themes
                resize(driver, width)
                assert until(lambda width=width: script("return innerWidth") == width and not script(FLAWS)), (
                    width,
                    script(FLAWS),
                )
            assert all(x == "time of day" and y for x, y in script(AXES)) and not script(BARE), script(AXES)
            assert script("return document.getElementById('state').className") == "chip error"
            assert "bad" in script("return document.querySelector('[data-name=step]').className")
            words = script("return document.getElementById('failure').innerText")
            assert HANG["title"] in words and HANG["fix"] in words
            resize(driver, 1440)
            by_step(driver)
            keyboard(driver)
            for theme in ("light", "dark"):
                assert script("return document.documentElement.dataset.theme") == theme
                assert until(lambda: not script(PALE)), (theme, script(PALE))
                assert driver.execute_async_script(INK) >= 4.5
                script("document.getElementById('theme').click()")
        with served(running(many), tmp_path) as page:
            driver.get(page.address)
            assert until(lambda: script(DRAWN) == 6)
            names = "return drumbeat.charts.gpu_use.names.map((each) => each[1])"
            assert until(lambda: script(names) == ["mean and range of all nodes", "node 4"]), script(names)
            bands = "return drumbeat.charts.gpu_use.plot.data.filter((trace) => trace.fill).length"
            assert until(lambda: script(bands) == 1)
            assert until(lambda: not script(BARE)), "nodes whose only samples are milliseconds apart"
            assert "Each column is a node" in script("return document.getElementById('heatkey').textContent")


def resize(driver, width):
    size = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def by_step(driver):
    """Charts by step, and each of them as SVG."""
    script = driver.execute_script
    script("document.querySelector('[data-along=step]').click()")
    last = "const plot = drumbeat.charts.loss.plot; return [plot.layout.xaxis.title.text, plot.data[0].x.at(-1)]"
    assert until(lambda: script(last) == ["step", 40]), script(last)
    script("Plotly.downloadImage = (plot, how) => { window.saved = how; }; document.querySelector('.save').click()")
    assert script("return saved.format + saved.filename") == "svgloss"
    drawn = "const done = arguments[0]; Plotly.toImage(drumbeat.charts.loss.plot, {format: 'svg'}).then(done)"
    assert driver.execute_async_script(drawn).startswith("data:image/svg+xml")
    script("document.querySelector('[data-along=time]').click()")


def keyboard(driver):
    """A node is opened from the table and from the heat map, and closed, without a mouse."""
    script, focused = driver.execute_script, "return document.activeElement.id || document.activeElement.tagName"
    hidden = "return document.getElementById('drawer').hidden"
    for place in ("#nodes tbody tr", "#heat canvas"):
        assert until(lambda place=place: script("return Boolean(document.querySelector(arguments[0]))", place))
        script("document.querySelector(arguments[0]).focus()", place)
        keys.ActionChains(driver).send_keys(keys.Keys.ARROW_RIGHT, keys.Keys.ENTER).perform()
        assert until(lambda: not script(hidden)) and script(focused) == "close"
        keys.ActionChains(driver).send_keys(keys.Keys.ESCAPE).perform()
        assert until(lambda: script(hidden)) and script(focused) in ("TR", "CANVAS")
