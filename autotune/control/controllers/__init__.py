"""Controllers: from records of steps and requests to knobs. One algorithm a file; guardrails and logging wrap them.

Every module here is imported, so that ``@register`` puts its controllers into the registry.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
