// A search over panels of runs: their series, and their metrics, which the server searches.
import { isFound } from 'find_setting'
import { fetched, inTurn } from 'http'

const MOST_SHOWN = 100
/** @param {string} name @returns {Panel} */
const named = (name) => [name, name]

/** @typedef {[name: string, label: string]} Panel */

/**
 * @param {Found} box with the search, the list and the note
 * @param {{
 *   api: string,
 *   series: Panel[],
 *   last?: Panel[],
 *   runs: () => string[],
 *   first?: () => string[],
 *   row: (panel: Panel) => HTMLElement
 * }} options
 * series, last: panels besides those of metrics, above and below them; first: metrics above all others; row: what
 * stands for a panel
 */
export const createPanelList = (box, { api, series, last = [], runs, first = () => [], row }) => {
  const [search, list, note] = ['find-panel', 'panel-list', 'none'].map((name) => box.querySelector(`[data-${name}]`))
  const show = inTurn(async () => {
    const [ids, words] = [runs(), search.value.trim()]
    const query = new URLSearchParams({ runs: ids.join(), search: words, limit: String(MOST_SHOWN) })
    const answer = ids.length ? await fetched(`${api}/comparison/metrics/names?${query}`).catch(() => null) : null
    const { names, total } = answer ? await answer.json() : { names: [], total: 0 }
    const others = (panels) => panels.filter(([name, label]) => isFound(words, `${name} ${label}`))
    const above = first()
      .filter((name) => isFound(words, name))
      .map(named)
    const found = [
      ...above,
      ...others(series),
      ...names.filter((name) => !first().includes(name)).map(named),
      ...others(last),
    ]
    list.replaceChildren(...(ids.length ? found.map(row) : []))
    note.textContent = !ids.length
      ? 'Choose a run above.'
      : !found.length
        ? 'No panel has this name.'
        : total > names.length
          ? `${names.length} of ${total} metrics: search for others.`
          : ''
  })
  search.addEventListener('input', show)
  search.addEventListener('keydown', async (event) => {
    if (event.key !== 'Enter') return
    event.preventDefault()
    await show()
    list.querySelector('button, input')?.click()
  })
  return { show }
}
