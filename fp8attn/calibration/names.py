"""Names of a model's modules, the same whether the model is wrapped or not."""

from __future__ import annotations

from torch import jit, nn

WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}
"""Classes of modules that wrap another module, and the attribute that holds it. Names don't contain this attribute."""


DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
"""Attributes of a pipeline of diffusers that hold the models which run in every step."""


def module_of(model: object) -> nn.Module:
    """The model itself; of a pipeline of diffusers, the modules that run in every step, under their names.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, nn.Module):
        return model
    parts = {name: part for name in DENOISERS if isinstance(part := getattr(model, name, None), nn.Module)}
    if not parts:
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module, or a pipeline with one of {', '.join(DENOISERS)}")
    return nn.ModuleDict(parts)


def layer_names(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """The modules of a model with a forward in Python, and their names, the shortest path first. A module may be used
    in several places.

    Raises:
        TypeError: `model` isn't a module.
        ValueError: `model` is or contains a DataParallel.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module: of a pipeline, a part of it such as pipe.transformer")
    names: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, name: str, parents: tuple[nn.Module, ...]) -> None:
        if module in parents or isinstance(module, jit.ScriptModule):
            return
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"model has a torch.nn.DataParallel at {name!r}; it must have none, because its replicas can't be intercepted: pass its .module"
            )
        wrapped = _wrapped_attribute(module)
        if wrapped is None and (type(module).forward is not nn.Module.forward or "forward" in module.__dict__):
            names.setdefault(module, []).append(name)
        for attribute, child in module._modules.items():
            if child is not None:
                child_name = name if attribute == wrapped else f"{name}.{attribute}" if name else attribute
                visit(child, child_name, (*parents, module))

    visit(model, "", ())
    return {module: tuple(sorted(dict.fromkeys(of_module), key=lambda name: name.count("."))) for module, of_module in names.items()}


def name_in(caller: str, names: tuple[str, ...]) -> str:
    """The name of a module that `caller` calls.

    It is the caller's own name if the module calls itself, else the first name below the caller's, else the first name.
    """
    if caller in names:
        return caller
    for name in names:
        if caller == "" or name.startswith(f"{caller}."):
            return name
    return names[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that a wrapper holds, also through several wrappers. Any other module is returned itself."""
    attribute = _wrapped_attribute(model)
    return model if attribute is None else unwrapped(getattr(model, attribute))


def unwrapped_name(layer: str) -> str:
    """A name without the attributes of wrappers. `module` stays, because models also have attributes of this name."""
    hidden = set(WRAPPERS.values()) - {"module"}
    return ".".join(part for part in layer.split(".") if part not in hidden)


def shown(layer: str) -> str:
    """A layer's name for people to read."""
    return layer or "(the model itself)"


def scripted_modules(model: nn.Module) -> list[str]:
    """The names of modules whose forward doesn't run in Python."""
    return [name for name, module in model.named_modules() if isinstance(module, jit.ScriptModule)]


def _wrapped_attribute(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        attribute = WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if attribute is not None:
            return attribute
    return None
