"""count_tests.py DIRECTORY: for each JUnit file in it, the number of tests passed, failed and skipped, and the time."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

for path in sorted(pathlib.Path(sys.argv[1]).glob("*.xml")):
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    passed = len(cases) - failed - skipped
    print(f"{path.stem:8} {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s of tests")
