"""count_tests.py DIRECTORY: for each JUnit file in it, the number of tests passed, failed and skipped, the time, and
the names of those that failed. NAME-again is the second run of tests that failed in NAME."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

for path in sorted(pathlib.Path(sys.argv[1]).glob("*.xml")):
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failed = len(bad)
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    passed = len(cases) - failed - skipped
    print(f"{path.stem:8} {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s of tests")
    for case in bad:
        print(f"    failed: {case.get('classname', '')} {case.get('name', '')}")
