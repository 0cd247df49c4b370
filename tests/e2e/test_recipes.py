"""`images` and `finetune` in the browser, if torchvision, transformers and peft are installed."""

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from db.settings import Settings
from db.tables import Run
from tests.browser import STATUS, open_tab
from tests.site import Site, until

PATIENCE = 240_000  # milliseconds, for a slow machine


def needs(extra: str, *packages: str) -> pytest.MarkDecorator:
    """Skip a test before a browser is started for it."""
    missing = [package for package in packages if find_spec(package) is None]
    reason = f"needs {', '.join(missing)}: pip install '.[{extra}]', with PyPI's torch"
    return pytest.mark.skipif(bool(missing), reason=reason)


@pytest.fixture
def settings(site: Site) -> Settings:
    """Settings with the worker's data folder and database."""
    return Settings(data=site.data, database_url=site.url)


def start(site: Site, page: Page, title: str, fields: dict[str, str]) -> Run:
    """Fill in the form, start the run, and wait for its end."""
    page.get_by_role("link", name="New run").first.click()
    page.get_by_role("link", name=title).click()
    page.get_by_role("radio", name="fp32").check()
    page.locator("form details").evaluate_all("all => all.forEach(each => (each.open = true))")
    for name, value in fields.items():
        page.locator(f'[name="{name}"]').fill(value)
    page.get_by_role("button", name="Start run").click()
    page.wait_for_url("**/runs/1")
    status = page.locator(STATUS)
    expect(status).to_have_text("Finished", timeout=PATIENCE)
    return site.run(1)


@needs("images", "torchvision")
def test_images_learns_the_digits_files(
    site: Site, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder the digits' files are written and read by data workers; the page has
    top-1 and top-5.
    """
    cache = tmp_path / "cache"
    cache.mkdir()  # a run creates nothing outside of the data folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    fields = {"training.steps": "25", "training.warmup_steps": "2", "training.ema_decay": "0.9"}
    with site.worker(HALFSTEP_COLD="yes"):
        until(lambda: site.offers("images"))
        run = start(site, page, "Images in folders", fields | {"recipe.label_smoothing": "0.1"})
    assert run.step == 25
    assert len(list(tmp_path.rglob("*.png"))) == 1797
    top1, top5 = (
        float(page.locator(f'[data-metric="val/{name}"]').inner_text()) for name in ("top1", "top5")
    )
    assert 0.2 < top1 < top5 <= 1
    expect(page.locator('[data-metric="ema/val/top1"]')).to_have_count(1)
    open_tab(page, "Files")
    expect(page.get_by_role("link", name="classes.txt")).to_have_count(1)


@needs("finetune", "transformers", "peft")
def test_finetune_leaves_what_from_pretrained_loads(site: Site, page: Page, tmp_path: Path) -> None:
    """Two downloaded files of a tiny model load as a model with tokenizer by from_pretrained."""
    import transformers

    from tests.frameworks.tiny_model import TEXT, write_model

    write_model(tmp_path / "model")
    (tmp_path / "sums.txt").write_text(TEXT)
    fields = {
        "training.steps": "20",
        "training.warmup_steps": "2",
        "recipe.model": str(tmp_path / "model"),
        "recipe.text": str(tmp_path / "sums.txt"),
        "recipe.context": "16",
        "recipe.lora_rank": "0",
    }
    with site.worker(HALFSTEP_COLD="yes"):
        until(lambda: site.offers("finetune"))
        start(site, page, "Fine-tuning", fields)
    expect(page.locator('[data-metric="val/perplexity"]')).to_have_count(1)
    folder = tmp_path / "downloaded"
    open_tab(page, "Files")
    with page.expect_download() as started:
        page.get_by_role("link", name="huggingface.zip").click()
    with zipfile.ZipFile(started.value.path()) as archive:
        archive.extractall(folder)
    with page.expect_download() as started:
        page.locator(".checkpoints tr", has_text="safetensors").get_by_text("Download").click()
    started.value.save_as(folder / "model.safetensors")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == 300
