# shellcheck shell=bash disable=SC2034 # srun_flags, container and checkout are for the scripts that source this
# Sourced in a Slurm job: which Python, from where. choose_software runs on the first node only; what it exports reaches
# every node, and srun is called with "${srun_flags[@]}" "${container[@]}".

checkout=$SLURM_SUBMIT_DIR
source "$checkout/scripts/lib/messages.sh"
source "$checkout/scripts/lib/settings.sh"
source "$checkout/scripts/environment.sh"
srun_flags=() container=()

choose_software() {
    check_software
    load_modules
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        choose_container
    elif [[ -n ${CONDA_ENV:-} ]]; then
        command -v conda >/dev/null || fail "CONDA_ENV is $CONDA_ENV and conda is not on the PATH; load its module with MODULES"
        MEGASCAN_PYTHON=$(conda run -n "$CONDA_ENV" python -c 'import sys; print(sys.executable)') ||
            fail "there is no conda environment $CONDA_ENV; see conda env list"
    elif [[ -n ${VENV:-} ]]; then
        MEGASCAN_PYTHON=$VENV/bin/python
    elif [[ -z ${MEGASCAN_PYTHON:-} ]]; then
        prepare_environment train # here, so that the nodes do not all install at once
        MEGASCAN_PYTHON=$PYTHON
    fi
    [[ -n ${CONTAINER_IMAGE:-} ]] || command -v "$MEGASCAN_PYTHON" >/dev/null ||
        fail "$MEGASCAN_PYTHON cannot be run on $(hostname); set VENV, CONDA_ENV or MEGASCAN_PYTHON to one that every node sees"
    export MEGASCAN_PYTHON
}

load_modules() {
    [[ -n ${MODULES:-} ]] || return 0
    command -v module >/dev/null || fail "MODULES is '$MODULES' and there is no module command on $(hostname)"
    # shellcheck disable=SC2086 # several names
    module load $MODULES
}

choose_container() { # a .sif file or folder: Apptainer; anything else: an image for the pyxis plugin of srun
    local mounts="$checkout:$checkout,$RUN_DIR:$RUN_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    MEGASCAN_PYTHON=python3
    if [[ -e $CONTAINER_IMAGE ]]; then
        command -v apptainer >/dev/null || fail "CONTAINER_IMAGE is $CONTAINER_IMAGE and apptainer is not on the PATH"
        container=(apptainer exec --nv --bind "$mounts" --pwd "$checkout" "$CONTAINER_IMAGE")
    else
        srun_flags=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$checkout")
    fi
}
