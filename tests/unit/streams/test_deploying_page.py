"""The URLs that docs/deploying.md shows are understood."""

import re
from pathlib import Path

from worker.streams.address import Topology, parse_address

PAGE = (Path(__file__).parents[3] / "docs" / "deploying.md").read_text()


def test_every_url_of_the_table_is_understood() -> None:
    urls = [url for url in re.findall(r"`((?:rediss?|unix)[+a-z]*://[^`]*)`", PAGE) if "..." not in url]
    assert len(urls) == 5
    found = [parse_address(url.replace("/etc/ssl/redis-ca.pem", __file__)) for url in urls]
    assert {address.topology for address in found} == set(Topology)
    assert all(address.options["password"] == "password" for address in found)
