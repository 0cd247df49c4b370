// The newest precision diff, and its tables: sorted by a column, and back in the order of the modules.
import { inTurn, insisted } from 'http'

/**
 * Rows with their values in a column; empty ones last, infinite ones among the largest.
 * @param {number} column
 * @param {1|-1} direction
 * @returns {(a: HTMLTableRowElement, b: HTMLTableRowElement) => number}
 */
const compared = (column, direction) => (a, b) => {
  const [left, right] = [a, b].map((row) => row.cells[column].dataset.value ?? '')
  if (!left || !right) return Number(!left) - Number(!right)
  const [x, y] = [left, right].map((text) => (text === 'inf' ? Infinity : Number(text)))
  return x === y ? 0 : direction * (x < y ? -1 : 1)
}

/** @param {Found} box */
export const createPrecisionDiff = (box) => {
  box.addEventListener('click', ({ target }) => {
    const cell = /** @type {Element} */ (target).closest('th:has(> button)')
    if (!(cell instanceof HTMLTableCellElement)) return
    const table = cell.closest('table')
    if (!(table instanceof HTMLTableElement)) return
    // Errors begin with the largest; modules are in order only.
    const isDown = cell.cellIndex > 0 && cell.ariaSort !== 'descending'
    for (const each of table.tHead?.rows[0].cells ?? []) each.ariaSort = null
    cell.ariaSort = isDown ? 'descending' : 'ascending'
    const [body] = table.tBodies
    body.append(...[...body.rows].sort(compared(cell.cellIndex, isDown ? -1 : 1)))
  })
  return {
    refresh: inTurn(async () => {
      const page = new DOMParser().parseFromString(await (await insisted(location.href)).text(), 'text/html')
      const fresh = page.querySelector('[data-diff]')
      if (fresh) box.replaceChildren(...fresh.children)
    }),
  }
}
