# Completion of `jupyter-gpuckpt ...` and of `jupyter gpuckpt ...` for fish:
#   jupyter gpuckpt completion fish | source

# Complete a command line up to the cursor, by the program itself.
function __jupyter_gpuckpt_complete
    set -lx COMP_LINE (string replace -r '^\s*jupyter\s+gpuckpt' jupyter-gpuckpt -- (commandline -cp | string collect))
    set -lx COMP_POINT (string length -- $COMP_LINE)
    set -lx COMP_TYPE
    set -lx _ARGCOMPLETE 1
    set -lx _ARGCOMPLETE_SHELL fish
    set -lx _ARGCOMPLETE_DFS \t
    set -lx _ARGCOMPLETE_IFS \n
    set -lx _ARGCOMPLETE_SUPPRESS_SPACE 1
    jupyter-gpuckpt 8>&1 9>/dev/null 1>/dev/null 2>/dev/null
end

complete -c jupyter-gpuckpt -f -a '(__jupyter_gpuckpt_complete)'
complete -c jupyter -n '__fish_seen_subcommand_from gpuckpt' -f -a '(__jupyter_gpuckpt_complete)'
complete -c jupyter -n __fish_use_subcommand -a gpuckpt -d 'Save and restore kernels'
