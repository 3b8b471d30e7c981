# Bash completion of penstock: commands, and the flags and keys that a command's --help lists.
_penstock() {
  local current=${COMP_WORDS[COMP_CWORD]} word words=() commands
  local program=${COMP_WORDS[0]}
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do [[ $word == -* ]] || words+=("$word"); done
  commands=$("$program" --help 2>/dev/null | sed -n '/^subcommands:/I,$s/^  \([a-z]\+\) .*/\1/p')
  if [[ ${#words[@]} -eq 0 && $current != -* ]]; then
    COMPREPLY=($(compgen -W "$commands" -- "$current"))
  elif [[ $current == -* ]]; then
    local help=() listed
    for word in "${words[@]}"; do
      # Only the command itself, and the command of `data` and `inspect`, have a help page.
      [[ ${#help[@]} -eq 0 ]] && { [[ " ${commands//$'\n'/ } " == *" $word "* ]] && help+=("$word"); continue; }
      [[ ${help[0]} == data || ${help[0]} == inspect ]] && [[ ${#help[@]} -eq 1 ]] && help+=("$word")
    done
    listed=$("$program" "${help[@]}" --help 2>/dev/null | grep -oE -- '--[a-z][a-z0-9_.-]*' | sort -u)
    COMPREPLY=($(compgen -W "$listed" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
    if [[ ${#words[@]} -eq 1 && ( ${words[0]} == data || ${words[0]} == inspect ) ]]; then
      COMPREPLY=($(compgen -W "$("$program" "${words[0]}" --help 2>/dev/null | sed -n '/^subcommands:/I,$s/^  \([a-z]\+\) .*/\1/p')" -- "$current"))
    fi
  fi
}
complete -o filenames -F _penstock penstock
