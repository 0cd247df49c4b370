// The table of settings, searched by words and by what differs; both are in the address.

/**
 * @param {HTMLElement} section
 * @param {(kept: {setting: string, changed: string}) => void} onChange is told what the address is to keep
 */
export const createConfiguration = (section, onChange) => {
  const part = (name) => section.querySelector(`[data-${name}]`)
  const [search, found, onlyChanged] = ['settings-search', 'settings-found', 'only-changed'].map(part)
  const rows = [...section.querySelectorAll('.config tbody tr')]

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean)
    for (const row of rows) {
      const text = row.textContent.toLowerCase()
      row.hidden = !words.every((word) => text.includes(word)) || (onlyChanged.checked && !row.matches('.changed'))
    }
    const shown = rows.filter((row) => !row.hidden).length
    found.textContent = words.length || onlyChanged.checked ? `${shown} of ${rows.length} settings` : ''
    onChange({ setting: search.value.trim(), changed: onlyChanged.checked ? 'yes' : '' })
  }
  const query = new URLSearchParams(location.search)
  search.value = query.get('setting') ?? ''
  onlyChanged.checked = query.get('changed') === 'yes'
  search.addEventListener('input', filter)
  onlyChanged.addEventListener('change', filter)
  if (search.value || onlyChanged.checked) filter()
}
