"""What the site adds to the pages: help of commands, lists of names, no links out of the folder."""

import re
from importlib import import_module

import click

from pipeplan.commands.group import commands

COMMANDS = "<!-- commands -->"
NAMES = re.compile(r"<!-- names of (\S+) -->")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to files of the repository become plain text, because the site has no such page."""
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
    markdown = NAMES.sub(lambda match: _reference(match[1]), markdown)
    return markdown.replace(COMMANDS, _help_of_all()) if COMMANDS in markdown else markdown


def _reference(package: str) -> str:
    """An entry for each public name of a package that loads its names on first use."""
    places: dict[str, str] = import_module(package)._MODULE_OF
    return "\n\n".join(f"::: {place}.{name}" for name, place in sorted(places.items()))


def _help_of_all() -> str:
    group = click.Context(commands, info_name="pipeplan", max_content_width=88)
    texts = [f"```\n{commands.get_help(group)}\n```"]
    for name in commands.list_commands(group):
        command = commands.commands[name]
        context = click.Context(command, group, info_name=name, max_content_width=88)
        texts.append(f"## pipeplan {name}\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(texts)
