"""A model that is no transformer of the package, with site names of its own."""

import dataclasses

from models.architecture.transformer import LinearAttentionTransformer


class Renamed:
    """Answers as `Studied` asks, by a transformer whose sites are called otherwise."""

    def __init__(self, model: LinearAttentionTransformer):
        self.inner = model
        self.own = {name: f"place {i}" for i, name in enumerate(model.sites)}
        self.theirs = {own: name for name, own in self.own.items()}
        self.sites = {
            self.own[name]: dataclasses.replace(site, name=self.own[name])
            for name, site in model.sites.items()
        }

    @property
    def axis_sizes(self):
        return self.inner.axis_sizes

    @property
    def dtype(self):
        return self.inner.dtype

    def __call__(self, inputs):
        return self.inner(inputs)

    def run(self, prompts, reads=(), writes=None):
        theirs = {self.theirs[name]: value for name, value in (writes or {}).items()}
        names = [self.theirs[name] for name in ([reads] if isinstance(reads, str) else reads)]
        predictions, found = self.inner.run(prompts, names, theirs)
        return predictions, {self.own[name]: value for name, value in found.items()}

    def hooks(self, fwd_hooks=()):
        return self.inner.hooks([(self.theirs[name], hook) for name, hook in fwd_hooks])

    def select_sites(self, names_filter):
        if names_filter is None:
            return [name for name, site in self.sites.items() if not site.on_request]
        wanted = {names_filter} if isinstance(names_filter, str) else set(names_filter)
        return [name for name in self.sites if name in wanted]

    def untrained(self, generator):
        return Renamed(self.inner.untrained(generator))

    def like(self, weights):
        return Renamed(self.inner.like(weights))
