"""The test suite. This file makes `from tests.golden import load` mean this folder and no other package's tests."""
