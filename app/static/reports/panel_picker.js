// The picker of a report's panels: ticked runs, and a button for each chart and table of theirs.
import { count } from 'formats'
import { inTurn } from 'http'
import { createPanelList } from 'panel_list'
import { root } from 'root'

const WAIT_MS = 300 // after the last key
const MOST_RUNS = 8

/** @param {string} text of the report @returns {string[]} the runs of its panels, by how late they come */
const runsOf = (text) => [...text.matchAll(/^runs:(.*)$/gm)].flatMap(([, ids]) => ids.match(/\d+/g) ?? []).reverse()

/** @param {Found} picker @param {{text: Found, insert: (block: string, label: string) => void}} editor */
export const createPicker = (picker, { text, insert }) => {
  const [runs, search, list] = ['runs', 'find-run', 'panel-list'].map((name) => picker.querySelector(`[data-${name}]`))
  const ticked = () => [...runs.querySelectorAll(':checked')].map(({ value }) => value)
  /** @param {string} id @param {string} name @param {boolean} isTicked */
  const runRow = (id, name, isTicked) => {
    const row = document.createElement('label')
    const tick = Object.assign(document.createElement('input'), { type: 'checkbox', value: id, checked: isTicked })
    const words = Object.assign(document.createElement('span'), { textContent: name })
    row.append(tick, words, Object.assign(document.createElement('small'), { className: 'quiet', textContent: id }))
    return row
  }

  const showRuns = inTurn(async () => {
    const query = new URLSearchParams({ filter: search.value.trim(), limit: String(MOST_RUNS) })
    const answer = await fetch(`${root}/api/v1/runs?${query}`).catch(() => null)
    if (!answer?.ok) return // half of a filter is typed
    const { runs: listed, total } = await answer.json()
    const found = new Map(listed.map(({ id, name }) => [String(id), name]))
    const chosen = new Map(
      [...runs.querySelectorAll('label')]
        .filter((row) => row.querySelector(':checked'))
        .map((row) => [row.querySelector('input').value, row.querySelector('span').textContent]),
    )
    const focused = document.activeElement?.closest('[data-runs]') && /** @type {any} */ (document.activeElement).value
    runs.replaceChildren(
      ...[...new Map([...chosen, ...found])].map(([id, name]) => runRow(id, found.get(id) ?? name, chosen.has(id))),
    )
    if (total > found.size)
      runs.append(
        Object.assign(document.createElement('small'), {
          className: 'quiet',
          textContent: `${count(total - found.size)} more: type a part of the name`,
        }),
      )
    if (focused) runs.querySelector(`[value="${focused}"]`)?.focus()
  })
  const { show: showPanels } = createPanelList(picker, {
    api: `${root}/api/v1`,
    series: JSON.parse(picker.dataset.series),
    last: [['', 'Table of runs']],
    runs: ticked,
    row: ([name, label]) =>
      Object.assign(document.createElement('button'), { type: 'button', value: name, textContent: label }),
  })
  list.addEventListener('click', ({ target }) => {
    const button = target.closest('button')
    if (!button) return
    const lines = button.value
      ? ['```panel', `runs: ${ticked().join(', ')}`, `metrics: ${button.value}`]
      : ['```runs', `runs: ${ticked().join(', ')}`]
    insert([...lines, '```'].join('\n'), button.textContent)
  })
  let timer = 0
  search.addEventListener('input', () => {
    clearTimeout(timer)
    timer = setTimeout(showRuns, WAIT_MS)
  })
  search.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') event.preventDefault()
  })
  runs.addEventListener('change', showPanels)

  const names = JSON.parse(picker.dataset.names)
  runs.replaceChildren(
    ...[...new Set(runsOf(text.value))]
      .filter((id) => id in names)
      .slice(0, MOST_RUNS)
      .map((id) => runRow(id, names[id], true)),
  )
  picker.hidden = false
  showRuns()
  showPanels()
}
