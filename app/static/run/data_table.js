// A table that a run logged: sorted by a column, filtered, in pages, with the pictures that its cells name.
import { number } from 'formats'
import { missing, thumbnail } from 'media_images'

const ROWS = 20 // of a page
const BYTES = 4 * 2 ** 20 // that are read of a file

/** Rows of CSV; quoted cells may hold commas, quotes and line breaks. @param {string} text @returns {string[][]} */
export const parseCsv = (text) => {
  /** @type {string[][]} */
  const rows = []
  /** @type {string[]} */
  let row = []
  const cell = /(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r?\n|\r|$)/gy
  while (cell.lastIndex < text.length) {
    const match = cell.exec(text)
    if (!match) break
    const [, quoted, plain, end] = match
    row.push(quoted === undefined ? plain : quoted.replaceAll('""', '"'))
    if (end === ',' && cell.lastIndex < text.length) continue
    if (end === ',') row.push('')
    rows.push(row)
    row = []
  }
  return rows
}

/** @param {string} text */
const isNumber = (text) => text.trim() !== '' && !Number.isNaN(Number(text))

/**
 * Rows in the order of a column: as numbers where all of it are, empty cells last.
 * @param {string[][]} rows
 * @param {number} column
 * @param {1|-1} direction
 */
export const sortedRows = (rows, column, direction) => {
  const filled = rows.filter((row) => row[column]?.trim())
  const areNumbers = filled.every((row) => isNumber(row[column]))
  const compared = areNumbers
    ? (a, b) => Number(a[column]) - Number(b[column])
    : (a, b) => a[column].localeCompare(b[column], undefined, { numeric: true })
  return [...filled.sort((a, b) => direction * compared(a, b)), ...rows.filter((row) => !row[column]?.trim())]
}

/** Rows with a text in any cell, whatever its case. @param {string[][]} rows @param {string} text */
export const filteredRows = (rows, text) => {
  const wanted = text.trim().toLowerCase()
  return wanted ? rows.filter((row) => row.some((cell) => cell.toLowerCase().includes(wanted))) : rows
}

/** @param {string} tag @param {Record<string, any>} [fields] @param {(Node|string)[]} children @returns {any} */
const made = (tag, fields = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), fields)
  element.append(...children)
  return element
}

/** Columns that show a classifier's right and wrong rows, and its certainty. */
const [TRUE, PREDICTED, CERTAINTY] = [
  /^(true|truth|label|target|actual)s?$/i,
  /^(pred|predicted|prediction)s?$/i,
  /^(confidence|score|probability|prob)$/i,
]

/** @param {import('media').MediaCard} card @returns {import('media').ShowMedia} */
export const createDataTable = ({ name, body, say }) => {
  const filter = made('input', { type: 'search', placeholder: 'Filter rows' })
  filter.setAttribute('aria-label', `Filter rows of ${name}`)
  const [before, after] = ['Previous', 'Next'].map((label) =>
    made('button', { type: 'button', className: 'small', textContent: label }),
  )
  const table = made('table')
  const scroll = made('div', { className: 'table-scroll', tabIndex: 0 }, table)
  scroll.setAttribute('role', 'region')
  scroll.setAttribute('aria-label', `Table ${name}`)
  const element = made(
    'div',
    { className: 'data-table' },
    made('div', { className: 'inline' }, filter, before, after),
    scroll,
  )
  /** @type {string[]} */
  let head = []
  /** @type {string[][]} */
  let rows = []
  /** @type {{column: number, direction: 1|-1}|null} */
  let order = null
  let [page, isCut, shown] = [0, false, '']

  /** Pictures of the step, by the name that a cell has. @type {Map<string, import('media').MediaFile>} */
  let pictures = new Map()
  /** @param {string} text @param {number} column @param {string[]} row */
  const cellOf = (text, column, row) => {
    const picture = pictures.get(text)
    if (picture) return made('td', {}, thumbnail(picture))
    const cell = plainCell(text)
    const truth = head.findIndex((title) => TRUE.test(title))
    if (PREDICTED.test(head[column]) && truth >= 0) {
      const isWrong = row[truth] !== text
      cell.append(
        ...(isWrong
          ? [
              made('span', { title: 'wrong', textContent: ' ✕' }),
              made('span', { className: 'visually-hidden', textContent: ' wrong' }),
            ]
          : []),
      )
      cell.classList.toggle('bad', isWrong)
    }
    if (CERTAINTY.test(head[column]) && Number(text) >= 0 && Number(text) <= 1)
      cell.prepend(made('meter', { value: Number(text) }), ' ')
    return cell
  }
  /** @param {string} text */
  const plainCell = (text) => {
    if (isNumber(text))
      return made('td', {
        textContent: Number.isInteger(Number(text)) ? text : number(text, 6),
        title: text,
        className: 'number',
      })
    return made('td', { textContent: text })
  }
  const draw = () => {
    const matching = filteredRows(rows, filter.value)
    const all = order ? sortedRows(matching, order.column, order.direction) : matching
    page = Math.max(0, Math.min(page, Math.ceil(all.length / ROWS) - 1))
    const first = page * ROWS
    const visible = all.slice(first, first + ROWS)
    table.replaceChildren(
      made(
        'thead',
        {},
        made(
          'tr',
          {},
          ...head.map((title, column) => {
            const isOrder = order?.column === column
            const button = made('button', {
              type: 'button',
              className: 'ghost',
              textContent: `${title}${isOrder ? (order?.direction === 1 ? ' ↑' : ' ↓') : ''}`,
            })
            button.dataset.column = String(column)
            const cell = made(
              'th',
              { scope: 'col', className: visible.some((row) => isNumber(row[column] ?? '')) ? 'number' : '' },
              button,
            )
            if (isOrder) cell.setAttribute('aria-sort', order?.direction === 1 ? 'ascending' : 'descending')
            return cell
          }),
        ),
      ),
      made(
        'tbody',
        {},
        ...visible.map((row) => made('tr', {}, ...head.map((_, column) => cellOf(row[column] ?? '', column, row)))),
      ),
    )
    const range = all.length ? `${first + 1}–${first + visible.length} of ` : ''
    say(
      `${range}${all.length} ${all.length === 1 ? 'row' : 'rows'}${matching.length < rows.length ? ` that match, of ${rows.length}` : ''}${isCut ? ', the beginning of the file' : ''}`,
    )
    before.disabled = !first
    after.disabled = first + ROWS >= all.length
  }
  filter.addEventListener('input', () => {
    page = 0
    draw()
  })
  before.addEventListener('click', () => {
    page--
    draw()
  })
  after.addEventListener('click', () => {
    page++
    draw()
  })
  table.addEventListener('click', ({ target }) => {
    const button = target.closest('th button')
    if (!button) return
    const column = Number(button.dataset.column)
    order =
      order?.column !== column ? { column, direction: 1 } : order.direction === 1 ? { column, direction: -1 } : null
    draw()
    table.querySelector(`th [data-column="${column}"]`).focus()
  })

  return async (files) => {
    const { address } = files[0]
    shown = address
    if (!address) return body.replaceChildren(missing())
    pictures = new Map(files.map((file) => [file.name, file]))
    const answer = await fetch(address, { headers: { Range: `bytes=0-${BYTES - 1}` } })
    const text = answer.ok ? await answer.text() : ''
    if (shown !== address) return
    isCut = Number(answer.headers.get('Content-Range')?.split('/')[1] ?? 0) > BYTES
    ;[head = [], ...rows] = parseCsv(text)
    if (isCut) rows.pop() // half a row
    if (order && order.column >= head.length) order = null
    draw()
    body.replaceChildren(element)
  }
}
