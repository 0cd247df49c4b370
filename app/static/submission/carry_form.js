// A link to another form, which takes along what is typed in this one.

/**
 * Show another form with the values typed here; without a script it begins with the defaults.
 * @param {Found} form
 * @param {Found} link
 * @param {string} address
 */
export const takeAlong = (form, link, address) =>
  link.addEventListener('click', (event) => {
    if (!form || event.ctrlKey || event.metaKey || event.shiftKey) return
    event.preventDefault()
    const button = Object.assign(document.createElement('button'), {
      formAction: address,
      name: 'other',
      value: link.dataset.other ?? '',
      hidden: true,
    })
    form.append(button)
    button.click()
    button.remove()
  })
