"""``pyddl settings``: complete, and read back to the defaults."""

import dataclasses

from pyddl.config import Config, load_config
from pyddl.tasks.lm import LMConfig
from pyddl.view.settings import describe_settings, meanings


def test_settings_every_field_has_a_meaning() -> None:
    config = Config()
    for section in [*(getattr(config, f.name) for f in dataclasses.fields(config)), LMConfig()]:
        missing = {f.name for f in dataclasses.fields(section)} - meanings(section).keys()
        assert not missing, f"{type(section).__name__} does not explain {missing}"


def test_settings_read_back_gives_the_defaults(tmp_path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(describe_settings({"lm": LMConfig()}))
    config, sections = load_config(file, sections={"lm": LMConfig})
    assert config == Config()
    assert sections["lm"] == LMConfig()
