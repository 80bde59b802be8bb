# Completion of `jupyter-gpuckpt ...` and of `jupyter gpuckpt ...` for zsh, after `compinit`:
#   eval "$(jupyter gpuckpt completion zsh)"

# Complete the words behind the first $1 of a command line up to the cursor, by the program itself.
_jupyter_gpuckpt_words() {
    local IFS=$'\013'
    local line="jupyter-gpuckpt ${(j: :)${(@)words[$1 + 1, CURRENT - 1]}}"
    [[ $line == *' ' ]] || line+=' '
    line+=$PREFIX
    local -a found nospace
    found=($(
        IFS="$IFS" COMP_LINE="$line" COMP_POINT=${#line} _ARGCOMPLETE=1 _ARGCOMPLETE_SHELL=zsh \
            _ARGCOMPLETE_SUPPRESS_SPACE=1 jupyter-gpuckpt 8>&1 9>/dev/null >/dev/null 2>&1 </dev/null
    ))
    [[ ${found[1]-} == *[=/]([:]*|) ]] && nospace=(-S '')
    _describe jupyter-gpuckpt found "${nospace[@]}"
}

_jupyter_gpuckpt() {
    _jupyter_gpuckpt_words 1
}

_jupyter_with_gpuckpt() {
    if [[ ${words[2]} == gpuckpt ]] && (( CURRENT > 2 )); then
        _jupyter_gpuckpt_words 2
    elif [[ -n $_jupyter_before_gpuckpt ]]; then
        $_jupyter_before_gpuckpt "$@"
    elif (( CURRENT == 2 )); then
        compadd -- ${${(k)commands[(I)jupyter-*]}#jupyter-}
    else
        _files
    fi
}

# Whoever completed other commands of jupyter goes on doing so.
if [[ ${_comps[jupyter]-_jupyter_with_gpuckpt} != _jupyter_with_gpuckpt ]]; then
    _jupyter_before_gpuckpt=${_comps[jupyter]}
fi
compdef _jupyter_gpuckpt jupyter-gpuckpt
compdef _jupyter_with_gpuckpt jupyter
