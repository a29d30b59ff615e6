"""What the site adds to the pages: the help of all commands, and no links out of the folder."""

import re

import click

from pipeplan.commands.group import commands

COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to files of the repository become plain text, because the site has no such page."""
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
    return markdown.replace(COMMANDS, _help_of_all()) if COMMANDS in markdown else markdown


def _help_of_all() -> str:
    group = click.Context(commands, info_name="pipeplan", max_content_width=88)
    texts = [f"```\n{commands.get_help(group)}\n```"]
    for name in commands.list_commands(group):
        command = commands.commands[name]
        context = click.Context(command, group, info_name=name, max_content_width=88)
        texts.append(f"## pipeplan {name}\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(texts)
