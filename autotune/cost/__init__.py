"""The offline cost model: what a step costs on a machine that was measured."""
