# Each target sets everything up first; see setup.sh.
.PHONY: demo docs test test-browser test-long

demo:
	@python=$$(sh setup.sh) && $$python -m cpbkit demo

# The pages of the front door, from its docstrings, into a folder that git does not keep.
docs:
	@python=$$(sh setup.sh dev) && $$python -W error -m pdoc cpbkit -o build/docs

test:
	@python=$$(sh setup.sh dev) && $$python -m pytest -n 2 --dist loadfile -m "not alone and not lab and not long"

# What takes its time: kills, sixty days of records; loops that the doctor watches; a Ray cluster that loses a node. A
# loop's shares of time are another where a neighbour holds the machine back: of these alone, what failed is asked once
# more, by itself. A kill that fails once has failed.
LOOPS = tests/test_notes.py tests/test_soundness.py tests/test_watch.py
test-long:
	@python=$$(sh setup.sh dev) && \
	$$python -m pytest -n 2 --dist loadfile -m long $(LOOPS:%=--ignore=%) && \
	{ $$python -m pytest -n 2 --dist loadfile -m long $(LOOPS) || \
	  $$python -m pytest --last-failed --last-failed-no-failures none -m long $(LOOPS); } && \
	$$python -m pytest -m alone

test-browser:
	@python=$$(sh setup.sh dev,notebooks) && $$python -m pytest -m lab
