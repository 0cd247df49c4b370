// Menu of the charts' rows: which metrics come first or are folded away, and files of each row.
import { prefixOf } from 'figure'

/** @param {string} name @param {string} type @param {BlobPart} content */
const download = (name, type, content) => {
  const link = Object.assign(document.createElement('a'), { href: URL.createObjectURL(new Blob([content], { type })), download: name })
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 1000)
}

/** @param {string} text */
const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)

/** A text that a spreadsheet would take for a formula, as text. @param {string} text */
const harmless = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text)

/** What is drawn of lines, as they were sent. @param {{name: string, x: number[], y: (number|null)[]}[]} lines @param {string} mode */
const csvOf = (lines, mode) => [['line', mode, 'value'], ...lines.flatMap(({ name, x, y }) => x.map((at, i) => [harmless(name), at, y[i] ?? '']))]
  .map((row) => row.map((each) => quoted(String(each))).join(',')).join('\n')

/**
 * @param {HTMLDetailsElement} menu
 * @param {string} name of the files
 * @param {{composed: () => any, mode: () => string, picture: (name: string, format: 'png'|'svg', row: string|null) => void, fill: (row: string) => void}} charts fill: the screen
 * @param {{pinned: string[], collapsed: string[]}} arrangement
 * @param {() => void} onArrange
 */
export const createMenu = (menu, name, charts, arrangement, onArrange) => {
  const box = menu.querySelector('[data-rows]')
  const button = (label, act) => {
    const made = Object.assign(document.createElement('button'), { type: 'button', className: 'quiet', textContent: label })
    made.addEventListener('click', act)
    return made
  }
  /** A box that puts a name into a list, or takes it out. */
  const tick = (label, list, each, title) => {
    const made = Object.assign(document.createElement('label'), { title })
    const input = Object.assign(document.createElement('input'), { type: 'checkbox', checked: list.includes(each) })
    input.addEventListener('change', () => {
      if (input.checked) list.push(each)
      else list.splice(list.indexOf(each), 1)
      onArrange()
    })
    made.append(input, ` ${label}`)
    return made
  }
  const item = (title, ...parts) => {
    const made = document.createElement('li')
    made.append(Object.assign(document.createElement('span'), { textContent: title }), ...parts)
    return made
  }
  const fill = () => {
    const composed = charts.composed()
    if (!composed) return
    const rows = composed.rows.map((row) => item(
      composed.titles[row],
      ...(composed.metrics.includes(row) ? [tick('Pin', arrangement.pinned, row, `Pin ${row}: it comes before all other metrics of this recipe, in this browser`)] : []),
      button('Full screen', () => charts.fill(row)),
      button('PNG', () => charts.picture(`${name}-${row}`, 'png', row)),
      button('SVG', () => charts.picture(`${name}-${row}`, 'svg', row)),
      button('CSV', () => download(`${name}-${row.replaceAll('/', '-')}.csv`, 'text/csv', csvOf(composed.lines.filter((line) => line.row === row), charts.mode()))),
    ))
    const prefixes = [...new Set([...composed.metrics.map(prefixOf), ...arrangement.collapsed])].sort()
    const groups = prefixes.map((prefix) => item(`Metrics ${prefix ? `${prefix}…` : 'of no group'}`, tick('folded away', arrangement.collapsed, prefix, 'Not drawn, in this browser')))
    box.replaceChildren(
      item('All charts', button('PNG', () => charts.picture(name, 'png', null)), button('SVG', () => charts.picture(name, 'svg', null))),
      ...rows, ...groups,
    )
  }
  // Before it opens: what is replaced once it is seen would be gone under a key or a click.
  menu.querySelector('summary').addEventListener('click', () => { if (!menu.open) fill() })
}

/** Pinned metrics that an address asks for beside a page of them. */
const MOST_NAMED = 50

/** Which metrics the page shows, as the API is asked for them: those of its address, and pinned ones. @param {string} recipe @returns {Record<string, string|string[]>} */
export const metricsShown = (recipe) => {
  const own = new URLSearchParams(location.search)
  const asked = ['metric_search', 'metric_after'].flatMap((name) => (own.get(name) ? [[name, own.get(name)]] : []))
  const axes = [...document.querySelectorAll('[data-view=x][value^="metric:"]')]
    .map((each) => each.getAttribute('value')?.slice('metric:'.length) ?? '')
  const named = new Set([...axes, ...arrangementOf(recipe).arrangement.pinned])
  return { ...Object.fromEntries(asked), metric: [...named].slice(0, MOST_NAMED) }
}

/** The arrangement that this browser keeps for a recipe. @param {string} recipe */
export const arrangementOf = (recipe) => {
  const key = `halfstep.metrics.${recipe}`
  const texts = (list) => (Array.isArray(list) ? list.filter((each) => typeof each === 'string').slice(0, 200) : [])
  /** @type {any} */
  let kept = null
  try { kept = JSON.parse(localStorage.getItem(key) ?? 'null') } catch { /* somebody else's, or storage is off */ }
  const arrangement = { pinned: texts(kept?.pinned), collapsed: texts(kept?.collapsed) }
  const keep = () => { try { localStorage.setItem(key, JSON.stringify(arrangement)) } catch { /* it holds for this page */ } }
  return { arrangement, keep }
}
