# Each target sets everything up first; see setup.sh.
.PHONY: demo test

demo:
	@python=$$(sh setup.sh) && $$python -m cpbkit demo

test:
	@python=$$(sh setup.sh dev) && $$python -m pytest -n 2 --dist loadfile -m "not alone" && $$python -m pytest -m alone
