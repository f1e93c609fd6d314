"""The reader whose notebooks the tests run."""

from dataclasses import replace

import pytest
import torch

from minillm.course.session import available_cores, recorded_card
from minillm.model.device import resolve_device
from minillm.model.hub import cache_dir

KEPT = ("models", "converted", "transformers")  # large, and the same for everybody


@pytest.fixture(scope="session")
def reader_home(tmp_path_factory):
    """A cache folder for live runs (``MINILLM_HOME``): this user's models, nobody's guesses, and a machine card.

    The card is the recorded one under this machine's name: a card measured beside other tests would not be kept, and
    each notebook would take ten seconds to measure it anew.
    """
    home = tmp_path_factory.mktemp("reader")
    for name in KEPT:
        (cache_dir() / name).mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(cache_dir() / name, target_is_directory=True)
    card = recorded_card()
    if resolve_device() == card.device:
        replace(card, num_threads=available_cores(), versions=card.versions | {"torch": torch.__version__}, noise=0.0,
                cpu_share=1.0).save(home / "card.json")
    return home
