// Dialogs of a panel: its points as a table, and the range of its y axis.
import { count, number, place } from 'formats'

const DIGITS = 6 // of a value in the table

/** @typedef {{name: string, x: number[], y: (number|null)[]}} Line */

/** @param {string} title @param {string} content markup of ours */
const dialogOf = (title, content) => {
  const dialog = Object.assign(document.createElement('dialog'), {
    className: 'card panel-dialog',
    innerHTML: `<h2></h2>${content}`,
  })
  dialog.setAttribute('aria-labelledby', 'panel-dialog-title')
  Object.assign(/** @type {Found} */ (dialog.querySelector('h2')), { textContent: title, id: 'panel-dialog-title' })
  dialog.addEventListener('close', () => dialog.remove())
  ;(document.fullscreenElement ?? document.body).append(dialog)
  dialog.showModal()
  return dialog
}

/**
 * Values of lines by x, in order; of a line with several points at an x each has a row.
 * @param {Line[]} lines
 * @returns {[number, (number|null)[]][]}
 */
export const tableOf = (lines) => {
  /** Rows by x and its earlier occurrences. @type {Map<string, [number, (number|null)[]]>} */
  const rows = new Map()
  lines.forEach(({ x, y }, column) => {
    const times = new Map()
    x.forEach((at, i) => {
      times.set(at, (times.get(at) ?? 0) + 1)
      const key = `${times.get(at)} ${at}`
      const row = rows.get(key) ?? [at, lines.map(() => null)]
      row[1][column] = y[i] ?? null
      rows.set(key, row)
    })
  })
  return [...rows.values()].sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))
}

/**
 * Show the points that a panel draws.
 * @param {string} title
 * @param {Line[]} lines
 * @param {string} axis what x counts
 */
export const showTable = (title, lines, axis) => {
  const dialog = dialogOf(
    title,
    '<div class="table-scroll" tabindex="0" role="region"><table><thead><tr></tr></thead><tbody></tbody></table></div><form method="dialog" class="inline"><span class="quiet"></span><button class="end" autofocus>Close</button></form>',
  )
  dialog.querySelector('.table-scroll').setAttribute('aria-label', `Points of ${title}`)
  const cell = (kind, text, className = 'number') =>
    Object.assign(document.createElement(kind), { textContent: text, className })
  dialog
    .querySelector('thead tr')
    .append(
      ...[axis, ...lines.map(({ name }) => name)].map((name) => Object.assign(cell('th', name), { scope: 'col' })),
    )
  const rows = tableOf(lines)
  dialog.querySelector('tbody').append(
    ...rows.map(([at, values]) => {
      const row = document.createElement('tr')
      row.append(
        Object.assign(cell('th', place(at)), { scope: 'row' }),
        ...values.map((value) => cell('td', number(value, DIGITS))),
      )
      return row
    }),
  )
  dialog.querySelector('.quiet').textContent = `${count(rows.length)} points, as drawn`
}

/**
 * Ask for the range of a y axis.
 * @param {string} title @param {[number, number]} range of now @param {{isLog: boolean, isFixed: boolean}} axis
 * @param {(range: [number, number]|null) => void} onRange null: automatic
 */
export const askRange = (title, range, { isLog, isFixed }, onRange) => {
  const dialog = dialogOf(
    `Y range of ${title}`,
    '<form><div class="inline"><label>From <input inputmode="decimal" name="low" required></label><label>To <input inputmode="decimal" name="high" required></label></div><p class="error" role="alert"></p><div class="inline"><button class="primary">Fix range</button><button type="button" data-automatic>Automatic</button><button type="button" data-cancel>Cancel</button></div></form>',
  )
  const form = dialog.querySelector('form')
  const { low, high } = form.elements
  ;[low.value, high.value] = range.map((value) => String(Number(value.toPrecision(4))))
  dialog.querySelector('[data-automatic]').hidden = !isFixed
  dialog.querySelector('[data-automatic]').addEventListener('click', () => {
    dialog.close()
    onRange(null)
  })
  dialog.querySelector('[data-cancel]').addEventListener('click', () => dialog.close())
  form.addEventListener('submit', (event) => {
    event.preventDefault()
    const [from, to] = [Number(low.value), Number(high.value)]
    const wrong = [low.value, high.value].find((value) => !Number.isFinite(Number(value)))
    const problem = wrong
      ? `'${wrong}' is not a number; allowed: 10, 0.5, 1e-3`
      : !(from < to)
        ? `From = ${from}: must be less than ${to}.`
        : isLog && from <= 0
          ? `From = ${from}: must be greater than 0 on a log axis.`
          : ''
    dialog.querySelector('.error').textContent = problem
    if (problem) return
    dialog.close()
    onRange([from, to])
  })
}
