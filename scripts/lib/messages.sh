# shellcheck shell=bash disable=SC2034,SC2154 # $usage is the script's help text; `words` is for the script
# Sourced: what a script says, and the checks of an option's value.

note() { echo "note: $1" >&2; }

fail() { # sentence, exit code (1: cannot be done, 2: asked wrongly)
    echo "error: $1" >&2
    exit "${2:-1}"
}

split_option() { # the words that are left; fills `words` with the same, where --name=value has become --name value
    words=("$@")
    [[ $1 != --?*=* ]] || words=("${1%%=*}" "${1#*=}" "${@:2}")
}

need_value() { [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value; see --help" 2; }

is_whole() { # value lowest highest
    [[ $1 =~ ^[1-9][0-9]{0,8}$|^0$ ]] && (($1 >= $2 && $1 <= $3))
}

need_whole() { # option value [lowest [highest]]
    local lowest=${3:-1} highest=${4:-1000000}
    is_whole "$2" "$lowest" "$highest" || fail "$1 is '$2', expected a whole number from $lowest to $highest" 2
}

need_folder() { # option folder: one that is there, or that can be made
    local above=$2
    while [[ ! -e $above ]]; do above=$(dirname -- "$above"); done
    [[ -d $above ]] || fail "$1 is $2, and $above is no folder; give another"
    [[ -n ${dry_run:-} || -w $above ]] || fail "$1 is $2, and nothing may be written in $above; give another"
}

need_path() { # option path
    [[ -e $2 ]] || fail "$1 is $2, which is not there"
}

show_help() {
    echo "$usage"
    exit 0
}

is_one_of() { # word list…
    local word=$1 one
    shift
    for one in "$@"; do [[ $one != "$word" ]] || return 0; done
    return 1
}
