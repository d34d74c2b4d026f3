"""The live page in a real browser: headless Chromium, by playwright."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ports import free_port
from system.pages import DESKTOP, PHONE, served

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    with served("--fleet") as url:
        yield url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [pytest.param(DESKTOP, id="desktop"), pytest.param(PHONE, id="phone")])
def test_the_page_shows_a_fleet_and_its_numbers_move(watched, fleet, viewport, scheme):
    tab = watched(viewport=viewport, scheme=scheme)
    tab.live(fleet)
    first = tab.text("#throughput-facts")
    tab.until(lambda: tab.text("#throughput-facts") != first)
    assert tab.text("#model") == "Qwen3-8B"
    assert "ms" in tab.text("#latency")
    assert tab.text("#healthy") == "3 of 4 healthy"
    rows = tab.page.locator("#workers tr")
    assert rows.count() == 4
    assert "down" in rows.nth(2).inner_text()
    assert "no heartbeat" in rows.nth(2).inner_text()
    assert "forward" in tab.text("#places")
    assert tab.page.locator("#sizes li").count() > 2
    assert tab.page.locator("#throughput-line .line").get_attribute("d").count(",") > 1
    assert not tab.too_wide
    assert tab.said == []
    assert {url.split("/")[2] for url in tab.asked} == {fleet.split("/")[2]}
    dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 22)"
    assert dark == (scheme == "dark")


def test_one_server_of_rows_has_neither_replicas_nor_tokens_and_one_that_does_nothing_says_so(watched):
    with served("--rows") as url:
        tab = watched()
        tab.live(url)
        assert tab.text("#throughput-unit") == "rows/s"
        assert not tab.page.is_visible("#replicas")
        assert not tab.page.is_visible("#tokens-tile")
    with served("--idle") as url:
        tab = watched(viewport=PHONE)
        tab.page.goto(url + "/")
        tab.until(lambda: tab.text("#throughput") == "0")
        assert "No batch" in tab.text("#sizes")
        assert tab.text("#latency") == "–"
        assert not tab.too_wide
        assert tab.said == []


@pytest.mark.parametrize("viewport", [pytest.param(DESKTOP, id="desktop"), pytest.param(PHONE, id="phone")])
def test_names_from_outside_are_text(watched, viewport):
    with served("--fleet", "--hostile") as url:
        tab = watched(viewport=viewport)
        tab.page.goto(url + "/")
        tab.until(lambda: "<img" in tab.text("#model"))
        tab.until(lambda: "<img" in tab.text("#workers"))
        assert "<script" in tab.text("#failure")
        assert tab.page.locator("main img, main script, h1 *").count() == 0
        assert "onerror" in tab.page.title(), "its words, and not what they would do"
        assert {one.split("/")[2] for one in tab.asked} == {url.split("/")[2]}
        assert not tab.too_wide
        assert tab.said == []


def test_a_server_that_goes_away_is_missed_and_found_again(watched):
    port = free_port()
    with served("--fleet", port=port) as url:
        tab = watched()
        tab.live(url)
    tab.until(lambda: tab.text("#state") == "not connected")
    assert "lost" in tab.text("#trouble")
    assert "figures of" in tab.text("#trouble")
    with served("--fleet", port=port):
        tab.until(lambda: tab.text("#state") == "live")
        assert not tab.page.is_visible("#trouble")
        line = tab.page.locator("#throughput-line .line")
        tab.until(lambda: str(line.get_attribute("d")).count("M") > 1)  # it has a gap
    assert not [said for said in tab.said if "net::ERR" not in said], "but for the connections that were refused"


def test_a_key_is_asked_for_sent_and_kept_in_the_tab_alone(watched, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right-key\n")
    keys.chmod(0o600)
    with served("--fleet", "--key-file", str(keys)) as url:
        tab = watched(viewport=PHONE)
        tab.page.goto(url + "/")
        for key in ("wrong", "schlüssel ☃"):
            tab.page.wait_for_selector("#key", state="visible")
            tab.page.fill("#secret", key)
            tab.page.click("#key button")
            tab.until(lambda: "refused" in tab.text("#key"))
        assert not tab.too_wide
        tab.page.fill("#secret", "right-key")
        tab.page.keyboard.press("Enter")
        tab.until(lambda: tab.text("#state") == "live")
        assert not tab.page.is_visible("#key")
        assert "right-key" not in " ".join(tab.asked)
        assert tab.page.evaluate("localStorage.length") == 0
        assert tab.context.cookies() == []
        tab.page.reload()
        tab.until(lambda: tab.text("#state") == "live")
        other = watched()
        other.page.goto(url + "/")
        other.page.wait_for_selector("#key", state="visible")


def test_the_policy_lets_no_other_code_run(watched, fleet):
    tab = watched()
    tab.live(fleet)
    tab.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "document.title = 'owned'";
        document.body.append(script);
        fetch("http://192.0.2.1/").catch(() => {});
    }""")
    tab.until(lambda: sum("Content Security Policy" in said for said in tab.said) >= 2)
    assert tab.page.title() != "owned"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_read_has_contrast(watched, scheme):
    """WCAG 2.2, 1.4.3: 4.5 to 1 for text, against what lies behind it."""
    tab = watched(scheme=scheme)
    with served("--fleet") as url:
        tab.live(url)
        assert tab.page.evaluate(CONTRAST) == []
    tab.until(lambda: tab.text("#state") == "not connected")
    assert tab.page.evaluate(CONTRAST) == []


CONTRAST = """() => {
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const over = (top, under) => top.rgb.map((value, i) => value * top.a + under[i] * (1 - top.a));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    if (!node) return [255, 255, 255];
    return over(parse(getComputedStyle(node).backgroundColor), behind(node.parentElement));
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility()) continue;
    const ground = behind(node), ink = over(parse(getComputedStyle(node).color), ground);
    const [low, high] = [light(ink), light(ground)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} "${node.textContent}" ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
