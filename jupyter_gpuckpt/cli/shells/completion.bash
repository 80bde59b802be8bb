# Completion of `jupyter-gpuckpt ...` and of `jupyter gpuckpt ...` for bash:
#   eval "$(jupyter gpuckpt completion bash)"

# Complete the words of a command line of jupyter-gpuckpt up to the cursor, by the program itself.
_jupyter_gpuckpt() {
    local IFS=$'\013'
    COMPREPLY=($(
        IFS="$IFS" COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_TYPE="$COMP_TYPE" \
            _ARGCOMPLETE_COMP_WORDBREAKS="$COMP_WORDBREAKS" _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=bash \
            _ARGCOMPLETE_SUPPRESS_SPACE=1 jupyter-gpuckpt 8>&1 9>/dev/null >/dev/null 2>&1 </dev/null
    )) || COMPREPLY=()
    if [[ ${COMPREPLY-} =~ [=/:]$ ]]; then
        compopt -o nospace
    fi
}

_jupyter_with_gpuckpt() {
    if [[ ${COMP_WORDS[1]} == gpuckpt && $COMP_CWORD -gt 1 ]]; then
        local before="${COMP_LINE%%gpuckpt*}"
        local COMP_LINE="jupyter-${COMP_LINE#"$before"}"
        local COMP_POINT=$((COMP_POINT - ${#before} + 8))
        _jupyter_gpuckpt
    elif [[ -n $_jupyter_before_gpuckpt ]]; then
        "$_jupyter_before_gpuckpt" "$@"
    elif [[ $COMP_CWORD == 1 ]]; then
        COMPREPLY=($(compgen -c jupyter- | sed 's/^jupyter-//' | sort -u | grep "^${2//[^A-Za-z0-9-]/}"))
    fi
}

# Whoever completed other commands of jupyter goes on doing so.
if [[ $(complete -p jupyter 2>/dev/null) =~ -F\ ([^ ]+) && ${BASH_REMATCH[1]} != _jupyter_with_gpuckpt ]]; then
    _jupyter_before_gpuckpt=${BASH_REMATCH[1]}
fi
complete -o default -o bashdefault -F _jupyter_gpuckpt jupyter-gpuckpt
complete -o default -o bashdefault -F _jupyter_with_gpuckpt jupyter
