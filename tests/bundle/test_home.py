"""Without $HOME, the user database says where this user's files are; never the current folder."""

import os
import pwd

from drumbeat.base.folders import index_folder, users_folder


def test_without_home_the_user_database_counts():
    own = pwd.getpwuid(os.geteuid()).pw_dir
    assert index_folder({}) == os.path.join(own, ".local/state/drumbeat/runs")
    assert users_folder({"HOME": "/h"}, "XDG_CONFIG_HOME", ".config") == "/h/.config"
    assert users_folder({"XDG_CONFIG_HOME": "/c"}, "XDG_CONFIG_HOME", ".config") == "/c"
