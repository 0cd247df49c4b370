// The table of settings, searched by words and by what differs; both are in the address.
import { isFound } from 'find_setting'

/**
 * @param {HTMLElement} section
 * @param {(kept: {setting: string, changed: string}) => void} onChange is called with the URL's parameters
 */
export const createConfiguration = (section, onChange) => {
  const part = (name) => section.querySelector(`[data-${name}]`)
  const [search, counter, onlyChanged] = ['settings-search', 'settings-count', 'only-changed'].map(part)
  const rows = [...section.querySelectorAll('.config tbody tr')]

  /** Whether only differing settings are shown at first, if there are any. */
  const isUsual = rows.some((row) => row.matches('.changed'))

  const filter = () => {
    const sought = search.value.trim()
    for (const row of rows) {
      row.hidden = !isFound(sought, row.textContent) || (onlyChanged.checked && !row.matches('.changed'))
    }
    const shown = rows.filter((row) => !row.hidden).length
    counter.textContent = sought || onlyChanged.checked ? `${shown} of ${rows.length} settings` : ''
    onChange({ setting: sought, changed: onlyChanged.checked === isUsual ? '' : onlyChanged.checked ? 'yes' : 'no' })
  }
  const query = new URLSearchParams(location.search)
  search.value = query.get('setting') ?? ''
  onlyChanged.checked = query.has('changed') ? query.get('changed') === 'yes' : isUsual
  search.addEventListener('input', filter)
  onlyChanged.addEventListener('change', filter)
  if (search.value || onlyChanged.checked) filter()
}
