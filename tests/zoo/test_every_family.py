"""Every family of the installed transformers: equal to plain `generate`, or refused before anything is stored.

`make test-zoo` runs it and writes docs/design/families.md from what it leaves in build/zoo/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.zoo.tiny import AUTO, Family, families
from tests.zoo.worker import Worker

RESULTS = Path(__file__).parents[2] / "build" / "zoo"
EVERY = [f for mapping in AUTO for f in families(mapping)]
KINDS = {mapping: kind for mapping, kind in zip(AUTO, ("causal", "seq2seq", "image-text"), strict=True)}


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    own = Worker()
    yield own
    own.close()


@pytest.mark.zoo
@pytest.mark.parametrize("family", EVERY, ids=lambda f: f"{KINDS[f.mapping]}-{f.name}")
def test_equal_or_refused(family: Family, worker: Worker) -> None:
    found = worker.compare(family.name, family.mapping)
    RESULTS.mkdir(parents=True, exist_ok=True)
    place = RESULTS / f"{KINDS[family.mapping]}-{family.name.replace(' ', '-')}.json"
    place.write_text(json.dumps({"mapping": family.mapping, **asdict(found)}))
    assert found.fine, f"{found.outcome}: {found.message} {'; '.join(found.faults)}"
