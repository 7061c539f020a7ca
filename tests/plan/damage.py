"""Facts with holes: any optional value may be unknown, any list cut short."""

import dataclasses
from typing import Union, get_args, get_origin, get_type_hints


def damaged(record, random, chance):
    """A copy in which each optional field is None and each tuple or dict loses entries, with that chance."""
    hints = get_type_hints(type(record))
    changes = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        optional = get_origin(hints[field.name]) is Union and type(None) in get_args(hints[field.name])
        if optional and random.random() < chance:
            changes[field.name] = None
        elif isinstance(value, tuple):
            kept = tuple(item for item in value if random.random() >= chance)
            changes[field.name] = tuple(
                damaged(item, random, chance) if dataclasses.is_dataclass(item) else item for item in kept
            )
        elif isinstance(value, dict):
            changes[field.name] = {key: item for key, item in value.items() if random.random() >= chance}
        elif dataclasses.is_dataclass(value):
            changes[field.name] = damaged(value, random, chance)
    if isinstance(changes.get("ephemeral_ports"), tuple):
        del changes["ephemeral_ports"]  # a pair, not a list
    return dataclasses.replace(record, **changes)
