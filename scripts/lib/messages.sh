# shellcheck shell=bash disable=SC2154 # $usage is the script's help text
# Sourced: what a script says, and the checks of an option's value.

note() { echo "note: $1" >&2; }

fail() { # sentence, exit code (1: cannot be done, 2: asked wrongly)
    echo "error: $1" >&2
    exit "${2:-1}"
}

need_value() { [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value; see --help" 2; }

need_whole() { # option value [lowest [highest]]
    local lowest=${3:-1} highest=${4:-1000000}
    [[ $2 =~ ^[1-9][0-9]{0,8}$|^0$ ]] && (($2 >= lowest && $2 <= highest)) && return
    fail "$1 is '$2', expected a whole number from $lowest to $highest" 2
}

show_help() {
    echo "$usage"
    exit 0
}

is_one_of() { # word list…
    local word=$1
    shift
    [[ " $* " == *" $word "* ]]
}
