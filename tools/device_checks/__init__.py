"""The sections of `tools/device_check.py`. Read `sections.py` first: the list; each of its functions yields rows."""
