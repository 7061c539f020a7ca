"""Pages that are made from the code when the site is built: commands and events."""

from mkdocs.structure.files import File

from drumbeat.cli import document as commands
from drumbeat.runfolder import document as events


def on_files(files, config):
    files.append(File.generated(config, "commands.md", content=commands.page()))
    files.append(File.generated(config, "events.md", content=events.page()))
    return files
