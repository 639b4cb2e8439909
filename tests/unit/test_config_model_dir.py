"""A model directory that is none is said with the setting that names it."""

import pytest

from polyrl.config.model_dir import check_model_dir
from polyrl.errors import ConfigError


@pytest.mark.parametrize("key", ["--model", "algorithm.reference"])
def test_a_folder_without_a_config_is_no_model_directory(tmp_path, key):
    with pytest.raises(ConfigError) as caught:
        check_model_dir(str(tmp_path), key)
    expected = f"{key}: {tmp_path}: no config.json there; expected a Hugging Face model directory"
    assert str(caught.value) == expected
    (tmp_path / "config.json").write_text("{}")
    check_model_dir(str(tmp_path), key)
